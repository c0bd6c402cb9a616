"""A token for the processes of one job that run as the same user, from a secret file in the user's home folder.

Strangers know a job's id. They cannot read the file, so they cannot join the run.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

_FILE = ".config/redeqx/secret"
# A home folder on one of these is the same on all hosts; on a local disk each host would have another secret.
_SHARED = "9p|afs|beegfs|ceph|cifs|fhgfs|gpfs|lustre|nfs|nfs4|panfs|smb3|virtiofs|wekafs"


def job_token(job: str, *, is_one_host: bool) -> str:
    """Returns a token that is the same in all processes of the job (`is_one_host`: all are here); `""` if they cannot share
    one."""
    try:
        home = Path.home()
        if not is_one_host and not re.fullmatch(_SHARED, _file_system(home)):
            return ""
        secret = _read(home / _FILE)
    except (OSError, RuntimeError):  # a home folder that is not writable, or none
        return ""
    return hmac.new(secret, job.encode(), hashlib.sha256).hexdigest() if secret else ""


def _read(path: Path) -> bytes:
    """Returns the content of the secret file, and creates it if there is none; `b""` if others may read it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):  # another process of the job came first
                os.link(own, path)  # complete or absent, even over NFS
        finally:
            own.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        return b"" if status.st_uid != os.getuid() or status.st_mode & 0o077 else file.read(64)


def _file_system(path: Path) -> str:
    """Returns the type of the file system that a folder is on; `""` if the system does not say."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        real = os.path.realpath(path)
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            _, mount, found, *_ = line.split(" ")
            if len(mount) >= len(best) and (real == mount or real.startswith(mount.rstrip("/") + "/")):
                best, kind = mount, found
    return kind.removeprefix("fuse.")
