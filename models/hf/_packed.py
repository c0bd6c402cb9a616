"""Folders of quantized weights, which are read as their numbers: MXFP4, FP8 and INT8, and 4 bits of bitsandbytes.

A matrix is stored as codes, and scales in tensors beside it. A `Source` shows them as one tensor, which is computed where it
is read, so that a device decodes only its own slices. The numbers are bfloat16, or what the folder says, unless the caller
asks for another dtype. They are products in float32, rounded to that dtype.

Sources: *OCP Microscaling Formats (MX) Specification* 1.0, 2023, in the layout of gpt-oss; *DeepSeek-V3* (arXiv:2412.19437);
*QLoRA* (arXiv:2305.14314), in the layout of `bitsandbytes`; `compressed-tensors` 0.20; NVIDIA's ModelOpt.
"""

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from redeqx.checkpoint import TensorReader
from redeqx.errors import brief
from redeqx.storage import Location, StoredArray, View

from ._files import CONFIG, read_config

# The numbers of four bits in MXFP4: a sign, two bits of exponent, and one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
_BIAS = 127  # of exponents
_STATE = ".quant_state.bitsandbytes__"
_MODELOPT = "hf_quant_config.json"  # says what `quantization_config` says, in folders of older versions
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # of ModelOpt, that have one factor, or one for each row
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")  # of `compressed-tensors`, whose codes are numbers
# The ends of the names of scales of activations, and of cached keys and values, none of which are quantized here.
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".activation_scale", "_activation_scale")
_OTHERS = (*_ACTIVATIONS, ".q_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Numbers:
    """The numbers of one tensor.

    **Arguments:**

    - `parts`: the names of the tensors that hold them.
    - `shape`: their shape.
    - `decode`: returns the numbers `[start, stop)` in C order, in float32.
    - `dtype`: the dtype that the folder says; None for that of its config.
    - `transposes`: whether the last two dims are exchanged.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    decode: Callable[[int, int], np.ndarray]
    dtype: Any = None
    transposes: bool = False

    def view(self, dtype: Any) -> StoredArray:
        """Returns them as an array of a dtype."""
        array = StoredArray.of(_Bytes(self.decode, np.dtype(dtype)), int(np.prod(self.shape)) * dtype.itemsize)
        array = array.view(dtype).reshape(self.shape)
        n = len(self.shape)
        return array.transpose(*range(n - 2), n - 1, n - 2) if self.transposes else array


@dataclass(frozen=True)
class _Bytes:
    """The bytes of numbers in a dtype. See `redeqx.storage.Readable`."""

    decode: Callable[[int, int], np.ndarray]
    dtype: np.dtype

    def read(self, start: int, stop: int) -> bytes:
        size = self.dtype.itemsize
        return self.decode(start // size, stop // size).astype(self.dtype).tobytes()


class Source:
    """The tensors of a folder, some of which are shown in place of those that they are computed from."""

    def __init__(self, source: "TensorReader | Source", shown: Mapping[str, Callable[[], View]], *, hidden: Collection[str]):
        self.path, self.paths, self._source, self._shown, self._hidden = source.path, source.paths, source, shown, hidden

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return [*(name for name in self._source.names() if name not in self._hidden), *self._shown]

    def view(self, name: str) -> View:
        """Returns a tensor."""
        return self._shown[name]() if name in self._shown else self._source.view(name)


def read_quantization(folder: Location, fields: Mapping[str, Any]) -> Any:
    """Returns the `quantization_config` of a folder; None if its weights are not quantized.

    **Arguments:**

    - `fields`: the folder's `config.json`.

    Raises ValueError for one that is not read.
    """
    path, said = folder / CONFIG, fields.get("quantization_config")
    if said is None and (folder / _MODELOPT).is_file():
        path, said = folder / _MODELOPT, read_config(folder, _MODELOPT).get("quantization")
        said = {"quant_method": "modelopt", **said} if isinstance(said, dict) else said
    if said is not None and not _is_read(said):
        raise ValueError(
            f"`{path}`: `quantization_config`: expected none, mxfp4, bitsandbytes with `load_in_4bit`, or weights of 8 bits "
            "of fp8, fbgemm_fp8, modelopt, or compressed-tensors without zero points and transforms, got "
            f"{brief(said)}. Load the weights before quantization, or have `transformers` dequantize and save them."
        )
    return said


def _is_read(said: Any) -> bool:
    said = said if isinstance(said, dict) else {}
    method = said.get("quant_method")
    if method == "bitsandbytes":
        return said.get("load_in_4bit", said.get("_load_in_4bit")) is True
    return method == "mxfp4" or _blocks(said) is not None


def _blocks(said: Mapping[str, Any]) -> list[Sequence[int]] | None:
    """Returns the sizes of the blocks of matrices of 8 bits that have a factor each; None for formats that are not read. One
    factor of a matrix, or one of each row, shows in its shape."""
    method, groups = said.get("quant_method"), said.get("config_groups")
    if method == "fp8":
        blocks = [said.get("weight_block_size", [128, 128])]  # the default of transformers
    elif method == "compressed-tensors" and isinstance(groups, dict) and groups and not said.get("transform_config"):
        blocks = [_block(group, said.get("format")) for group in groups.values()]
    elif method == "fbgemm_fp8" or (method == "modelopt" and said.get("quant_algo") in _ALGORITHMS):
        blocks = []
    else:
        return None
    blocks = [block for block in blocks if block is not None]
    is_read = all(isinstance(block, list) and len(block) == 2 for block in blocks)
    return blocks if is_read and all(type(size) is int and size > 0 for block in blocks for size in block) else None


def _block(group: Any, form: Any) -> Any:
    """Returns the block of a group of layers of `compressed-tensors`: None for none, and () if it is not read."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or (group.get("format") or form) not in _FORMATS:
        return ()
    if weights.get("num_bits") != 8 or weights.get("symmetric", True) is not True:
        return ()
    if weights.get("strategy") == "group":
        return [1, weights.get("group_size")]
    return weights.get("block_structure") if weights.get("strategy") == "block" else None


def unpacked(source: TensorReader, folder: Location, wanted: Collection[str], dtype: Any = None) -> TensorReader | Source:
    """Returns the tensors of a folder, with those that are quantized as one each.

    **Arguments:**

    - `wanted`: the names of the model's tensors.
    - `dtype`: the dtype of the numbers; None for the folder's.

    Raises ValueError for codes without their scales, or of other shapes or dtypes than the format's.
    """
    fields = read_config(folder) if (folder / CONFIG).is_file() else {}
    said = read_quantization(folder, fields)
    if said is None:
        return source
    method, unused = said["quant_method"], []
    if method == "mxfp4":
        bases = {name.removesuffix("_blocks"): name for name in source.names() if name.endswith("_blocks")}
        found = {base: _mxfp4(source, base, name) for base, name in bases.items() if base in wanted}
    elif method == "bitsandbytes":
        states = [name for name in source.names() if _STATE in name]
        found = {name.partition(_STATE)[0]: _four_bits(source, name) for name in states}
    else:
        kinds = ("float8_e4m3", "int8") if method == "compressed-tensors" else ("float8_e4m3",)
        ends = ("_scale_inv", "_scale") if method == "fp8" else ("_scale",)  # both are multiplied with the codes
        names = [name for name in source.names() if str(source.view(name).dtype).startswith(kinds)]
        found = {name: _eight_bits(source, name, ends, _blocks(said) or ()) for name in names}
        unused = [name for name in source.names() if name.endswith(_OTHERS)]
    default = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    dtypes = {name: jnp.dtype(dtype or numbers.dtype or default) for name, numbers in found.items()}
    shown = {name: functools.partial(numbers.view, dtypes[name]) for name, numbers in found.items()}
    return Source(source, shown, hidden={*unused}.union(*(numbers.parts for numbers in found.values())))


def _mxfp4(source: TensorReader, base: str, name: str) -> Numbers:
    """Returns a matrix of each expert, `[experts, out, in]`, of blocks of 32 numbers with a common exponent. Each byte holds
    two of them, the first one in its low bits."""
    blocks, scales = source.view(name), _get(source, f"{base}_scales")
    is_read = scales is not None and scales.ndim == 3 and {blocks.dtype, scales.dtype} == {np.dtype(np.uint8)}
    if scales is None or not is_read or blocks.shape != (*scales.shape, 16):
        raise _refuse(source, f"{base}_scales", scales, f"uint8, one number for each block of `{name}`, {_told(blocks)}")

    def decode(start: int, stop: int) -> np.ndarray:
        first, last = start // 32, -(-stop // 32)
        pairs = np.asarray(blocks.reshape(-1, 16)[first:last])
        exponents = np.asarray(scales.reshape(-1)[first:last]).astype(np.int32) - _BIAS
        numbers = _NUMBERS[np.stack([pairs & 15, pairs >> 4], axis=-1)].reshape(-1, 32)
        return np.ldexp(numbers, exponents[:, None]).reshape(-1)[start - 32 * first : stop - 32 * first]

    shape = (*scales.shape[:-1], 32 * scales.shape[-1])
    return Numbers((name, f"{base}_scales"), shape, decode, "bfloat16", transposes=True)  # which holds them exactly


def _eight_bits(source: TensorReader, name: str, ends: Sequence[str], blocks: Sequence[Sequence[int]]) -> Numbers:
    """Returns a matrix of numbers of 8 bits, `[out, in]`, or those of all experts. A matrix has one factor, one for each
    row, or one for each block of rows and columns, of which the last ones may be smaller."""
    codes, disk = source.view(name), next((name + end for end in ends if name + end in source), name + ends[0])
    scales = _get(source, disk)
    if codes.ndim < 2:
        raise _refuse(source, name, codes, "a matrix")
    *experts, n_rows, n_columns = codes.shape
    sizes = [*blocks, (1, n_columns), (n_rows, n_columns)]
    grids = {(*experts, -(-n_rows // height), -(-n_columns // width)): (height, width) for height, width in sizes}
    block = None if scales is None else grids.get((*scales.shape, *[1] * (codes.ndim - scales.ndim)))
    if scales is None or block is None or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise _refuse(source, disk, scales, f"floats {' or '.join(map(str, grids))} for `{name}`, {_told(codes)}")
    height, width = block
    n_high, n_wide = -(-n_rows // height), -(-n_columns // width)

    def place(row: Any) -> Any:
        return row // n_rows * n_high + row % n_rows // height

    def decode(start: int, stop: int) -> np.ndarray:
        first, last = start // n_columns, -(-stop // n_columns)
        top = place(first)
        factors = np.asarray(scales.reshape(-1, n_wide)[top : place(last - 1) + 1]).astype(np.float32)
        factors = factors[place(np.arange(first, last)) - top].repeat(width, 1)[:, :n_columns]
        numbers = np.asarray(codes.reshape(-1, n_columns)[first:last]).astype(np.float32) * factors
        return numbers.reshape(-1)[start - first * n_columns : stop - first * n_columns]

    return Numbers((name, disk), codes.shape, decode)


def _four_bits(source: TensorReader, state_name: str) -> Numbers:
    """Returns a matrix of numbers of 4 bits from a table, with a factor for each block of them in C order. Each byte holds
    two, the first one in its high bits. Factors may be quantized too: numbers of 8 bits from a table, with factors of their
    own, and a common offset."""
    name = state_name.partition(_STATE)[0]
    try:
        state = json.loads(np.asarray(source.view(state_name)).tobytes())
        shape, size, dtype = tuple(state["shape"]), int(state["blocksize"]), jnp.dtype(state["dtype"])
        nested = ("nested_absmax", "nested_quant_map") if state.get("nested_blocksize") else ()
        each, offset = (int(state["nested_blocksize"]), np.float32(state["nested_offset"])) if nested else (1, np.float32(0))
    except (ValueError, KeyError, TypeError) as error:
        raise _refuse(source, state_name, source.view(state_name), "JSON of the format's state") from error
    parts = {part: f"{name}.{part}" for part in ("absmax", "quant_map", *nested)}
    views: dict[str, Any] = {part: _get(source, disk) for part, disk in parts.items()}
    codes, n = _get(source, name), int(np.prod(shape))
    lengths = {"absmax": -(-n // size), "quant_map": 16, "nested_quant_map": 256}
    if nested:
        lengths["nested_absmax"] = -(-lengths["absmax"] // each)
    for part, view in views.items():
        if view is None or view.shape != (lengths[part],):
            raise _refuse(source, parts[part], view, f"{lengths[part]} numbers for `{name}`, {shape}")
    if codes is None or codes.dtype != np.uint8 or codes.size != -(-n // 2):
        raise _refuse(source, name, codes, f"uint8, two of the {n} numbers of {shape} in each")
    table, *inner = (np.asarray(views[part]) for part in ("quant_map", *nested[1:]))

    def factors(start: int, stop: int) -> np.ndarray:
        found = np.asarray(views["absmax"][start:stop])
        if not nested:
            return found
        outer = np.asarray(views["nested_absmax"][start // each : -(-stop // each)]).repeat(each)[start % each :]
        return inner[0][found] * outer[: stop - start] + offset

    def decode(start: int, stop: int) -> np.ndarray:
        first, top = start // 2, start // size
        pairs = np.asarray(codes.reshape(-1)[first : -(-stop // 2)])
        numbers = table[np.stack([pairs >> 4, pairs & 15], axis=-1)].reshape(-1)
        of_each = factors(top, -(-stop // size)).repeat(size)
        return numbers[start - 2 * first : stop - 2 * first] * of_each[start - top * size : stop - top * size]

    return Numbers((name, state_name, *parts.values()), shape, decode, dtype)


def _get(source: TensorReader, name: str) -> View | None:
    return source.view(name) if name in source else None


def _told(view: View) -> str:
    return f"{view.dtype} {view.shape}"


def _refuse(source: TensorReader, name: str, found: View | None, expected: str) -> ValueError:
    got = "none" if found is None else _told(found)
    return ValueError(f"`{source.path}`: `{name}`: expected {expected}, got {got}. Fetch the file again.")
