"""Edits checkpoints as their format allows: anything that computes a crc32 can."""

import json
import zlib


def edit_manifest(folder, change):
    """Changes a checkpoint's manifest, and corrects its checksum; `change` edits the record, or returns another."""
    path = folder / "trainer.json"
    record = json.loads(path.read_text())
    del record["crc32"]
    record = change(record) or record
    crc32 = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    path.write_text(json.dumps({**record, "crc32": crc32}))
    return record
