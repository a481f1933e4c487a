"""Saving and resuming.

saver.py, background.py        how a checkpoint is written while training continues
state.py, packed.py            what it holds: tensors, and other states as bytes
format.py                      its files: hashes, manifest, publishing, removal
allow_list.py                  reading files that nobody vouches for
resume.py, compatibility.py    which checkpoint a run resumes, and whether it fits the run
weights.py                     the model's weights alone, for export and sample
task_state.py                  a warning of what no checkpoint holds
"""
