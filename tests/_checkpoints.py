"""The format of checkpoints, written down a second time; and edits of a manifest, which anything with a crc32 can make."""

import json
import zlib

import jax.numpy as jnp
import numpy as np

DTYPES = {  # of safetensors, by its codes
    code: np.dtype(dtype)
    for code, dtype in {
        "BOOL": bool, "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "BF16": jnp.bfloat16, "F32": "<f4", "F64": "<f8", "C64": "<c8",
        "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu,
        "F8_E4M3FNUZ": jnp.float8_e4m3fnuz, "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
    }.items()
}  # fmt: skip


def edit_manifest(folder, change):
    """Changes a checkpoint's manifest, and corrects its checksum; `change` edits the record, or returns another."""
    path = folder / "trainer.json"
    record = json.loads(path.read_text())
    del record["crc32"]
    record = change(record) or record
    crc32 = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    path.write_text(json.dumps({**record, "crc32": crc32}))
    return record
