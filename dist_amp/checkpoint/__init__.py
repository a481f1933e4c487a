"""Saving and resuming.

saver.py, background.py        how a checkpoint is written while training continues
state.py, packed.py            what it contains: tensors, and other states as bytes
format.py                      its files: hashes, manifest, publishing, removal
allow_list.py                  reading untrusted files: nothing in them can run code
resume.py, compatibility.py    which checkpoint a run resumes, and whether it fits the run
weights.py                     the model's weights alone, for export and sample
task_state.py                  a warning about state that no checkpoint contains
"""
