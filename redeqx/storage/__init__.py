"""Object stores: paths in S3 and Google Cloud Storage, for code that reads and writes folders on a disk as well.

Owns the requests (through `obstore`, an optional package), their retries and errors, arrays that are read in ranges, the
local folder from which small files are uploaded, and on a disk, files that are never written through a link. Does not know
checkpoints or runs. Open `_path.py` first.
"""

from ._array import (
    Readable as Readable,
    StoredArray as StoredArray,
    View as View,
    fetch as fetch,
    merge_dims as merge_dims,
)
from ._disk import (
    StorageError as StorageError,
    check_subfolder as check_subfolder,
    check_writable as check_writable,
    disk_path as disk_path,
    explained as explained,
    make_subfolder as make_subfolder,
    next_step as next_step,
    open_new as open_new,
    open_old as open_old,
    read_file as read_file,
    remove_foreign as remove_foreign,
    replacing as replacing,
    write_file as write_file,
    write_new as write_new,
)
from ._path import (
    Location as Location,
    StorePath as StorePath,
    exists as exists,
    fsync_folder as fsync_folder,
    location as location,
    read_chunks as read_chunks,
)
from ._requests import StoreError as StoreError, limits as limits
from ._staging import Staging as Staging
