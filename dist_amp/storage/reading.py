"""What commands such as export read of a run at an address."""

import json
import math
import re
import shutil
from pathlib import Path

from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.files import only_process, write_durably
from dist_amp.storage.lease import FOLDER, last_lease
from dist_amp.storage.mirror import folder_for, local_folder, pull, unusable, write_address
from dist_amp.storage.store import HOLDER, Store

INSIDE = "/(?=checkpoints/)"  # what follows a run's address


def fetched(text: str) -> Path:
    """The path of a run, its checkpoint or another file; for one at an address, of what is fetched.

    A local folder that is as new as the address is used as it is; else another gets manifests and
    logs. A checkpoint's files follow when they are read. Errors: Failure.
    """
    if "://" not in text:
        return Path(text).expanduser()
    address, *inside = re.split(INSIDE, text.rstrip("/"), maxsplit=1)
    folder = local_folder(address)
    try:
        store = Store(address)
        leases = store.sizes(FOLDER)
        if not leases:
            raise DataError(f"{address} holds no run; give what its run.dir was")
        record = json.loads(store.read(max(leases)))
        if last_lease(folder, of_main=True) != record["id"]:
            folder = view(store, folder, record)
    except Failure:
        raise
    except Exception as error:  # each file system has errors of its own
        raise Failure(unusable(address, error)) from error
    return folder.joinpath(*inside)


def view(store: Store, folder: Path, record: dict[str, object]) -> Path:
    """A folder beside the run's that shows what is at the address. record: of its last lease."""
    shown = folder.with_name(f"{folder.name}-read")
    shown.mkdir(exist_ok=True)
    with only_process(shown / ".reading.lock", math.inf):
        if last_lease(shown) != record["id"]:
            shutil.rmtree(shown / "checkpoints", ignore_errors=True)
        write_address(shown, store.address)
        pull(store, shown, is_current=False, with_logs=True)
        write_durably(shown / HOLDER, json.dumps(record))
    return shown


def on_disk(text: str) -> Path:
    """Errors: ConfigError for an address."""
    if "://" not in text:
        return Path(text).expanduser()
    folder = folder_for(text.rstrip("/"))
    fix = f"give {folder}"
    if not (folder / HOLDER).exists():
        fix = "give one; the first lines of a run at an address name the run's"
    raise ConfigError(f"{text} is an address, and this needs a local folder: {fix}")
