"""What the dims of a traced function's values are: which of them are rows, and what the function does with rows.

Open `_use.py` first: `RowUse` is the verdict about a loss, which data, training and the dry run read.
"""

from ._use import RowUse as RowUse
