"""One field of one sample as plain numbers, or a `FieldError` that says what was given and what must hold.

Values may be plain Python, numpy or torch: whatever knows `tolist` is turned into numbers and lists first, which keeps
float32 exactly. Nothing here knows which sample it looks at; the builder puts the sample's name in front.
"""

from __future__ import annotations

import math
import reprlib
from array import array
from collections.abc import Mapping

from aggcli.errors import some

TRUNCATED = "truncated"
"""Status of a sample whose response was cut at the response limit."""
NOT_TRUNCATED = "not truncated"
"""Status of a sample where a source says no more than that."""


LONGEST = 2**31 - 1  # tokens of one sample; keeps a misread length from asking for all memory
LONGEST_ID = 256  # bits
EXACT = 2**53  # beyond it a float stands for several whole numbers, and two ids could become one


class FieldError(ValueError):
    """What is wrong with one field; the text starts with the field's name."""


def plain(value: object) -> object:
    """Tensors, arrays and numpy scalars as Python numbers and lists; everything else as it is."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def truncation(flag: object) -> str | None:
    """The status of a sample of which a source says only whether it was truncated; None where it does not say."""
    flag = plain(flag)
    return None if flag is None else TRUNCATED if flag in (1, True) else NOT_TRUNCATED


def shown(value: object) -> str:
    """A value short enough for one line, named as JSON names it."""
    names = {type(None): "null", dict: "an object"}
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return names.get(type(value)) or reprlib.repr(value).replace("\n", " ")
    except ValueError:  # Python writes out no number of more than some thousand digits
        return "a number of thousands of digits"


def listed(value: object, field: str) -> list | None:
    """A list field, None where it is missing."""
    if value is None or type(value) is list:
        return value
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    raise FieldError(f"{field} is {shown(value)}: must be a list of numbers, or null")


def whole(value: object, field: str) -> int:
    """A count: a whole number of at least 0, also when written as 7.0."""
    if type(value) is not int:
        value = plain(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LONGEST:
        raise FieldError(f"{field} is {shown(value)}: must be a whole number of at least 0")
    return value


def identifier(value: object, field: str) -> int | str:
    """An id: a whole number or a text."""
    value = plain(value)
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise FieldError(f"{field} is {shown(value)}: must be a whole number, a text or null")
    if isinstance(value, int) and value.bit_length() > LONGEST_ID:
        raise FieldError(f"{field} is a whole number of {value.bit_length()} bits: too large for an id")
    return value


def floats(values: list, field: str) -> array[float]:
    """Per-token numbers as float64; null is NaN."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):  # a null, or something that is no number: look at each
        return array("d", [_float(value, f"{field}[{i}]") for i, value in enumerate(values)])


def _float(value: object, field: str) -> float:
    value = plain(value)
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        raise FieldError(f"{field} is {shown(value)}: must be a number or null")
    try:
        return float(value)
    except OverflowError:
        raise FieldError(f"{field} is {shown(value)}: too large for a float64") from None


def number(value: object, field: str) -> float:
    """One number; null is NaN, bool is refused."""
    if isinstance(value, bool):
        raise FieldError(f"{field} is {shown(value)}: must be a number or null")
    return _float(value, field)


def token_ids(values: list) -> array[int]:
    """Token ids as int64."""
    try:
        return array("q", values)
    except (TypeError, OverflowError):  # something that is not an int: look at each
        return array("q", [_token_id(value, i) for i, value in enumerate(values)])


def _token_id(value: object, i: int) -> int:
    value = plain(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise FieldError(f"tokens[{i}] is {shown(value)}: must be a whole number, a token id")
    return value


def mask_bits(values: list) -> bytes:
    """`loss_mask` as one byte per token, 0 or 1; numbers and booleans are accepted."""
    try:
        bits = bytes(values)
    except (TypeError, ValueError):
        bits = b""
    if len(bits) == len(values) == bits.count(0) + bits.count(1):
        return bits
    for i, value in enumerate(map(plain, values)):
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise FieldError(f"loss_mask[{i}] is {shown(value)}: must be 0 or 1")
    return bytes([int(value) for value in values])


def reward(value: object, key: str | None) -> tuple[float, str | None]:
    """A reward and the form it came in: `text`, `bool`, or None for a number; NaN is unscored.

    An object needs `key`, the entry to take.
    """
    field, value = "reward", plain(value)
    if isinstance(value, dict):
        if key is None:
            raise FieldError(f"reward is an object with the keys {_keys(value)}: choose one with --reward-key")
        if key not in value:
            raise FieldError(f"reward has no key '{key}', only {_keys(value)}: change --reward-key")
        field, value = f"reward['{key}']", plain(value[key])
    form = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else None
    if isinstance(value, str):
        try:
            score = float(value.replace("_", "?"))  # float() takes 1_0 for 10
        except ValueError:
            raise FieldError(f"{field} is the text {shown(value)}: must be a number or null") from None
    else:
        score = _float(value, field)
    if math.isinf(score):
        raise FieldError(f"{field} is {shown(value)}: must be finite; null or NaN marks an unscored sample")
    return score, form


def _keys(value: dict) -> str:
    return some(sorted(map(str, value)), most=8) if value else "(none)"


# -- fields that depend on each other ----------------------------------------------------------------------------------


def advantage_of(value: object) -> tuple[list | None, float | None]:
    """(per-token list, None) or (None, one number for all tokens)."""
    value = plain(value)
    if value is None:
        return None, None
    if isinstance(value, (list, tuple)):
        return list(value), None
    return None, number(value, "advantage")


def response_length_of(value: object, lists: Mapping[str, list | None], mask: list | None) -> tuple[int, str]:
    """The response's length in tokens, and how a message introduces it."""
    if value is not None:
        return whole(value, "response_length"), "response_length is"
    for field, values in (*lists.items(), ("loss_mask", mask)):
        if values is not None:
            return len(values), f"response_length (taken from {field}) is"
    raise FieldError("response_length is missing: give it, or a loss_mask or a per-token list to take it from")


def total_length_of(value: object, ids: list | None, prompt: object, length: int) -> int:
    """Prompt and response tokens; without total_length and tokens, the prompt counts if it is a list of ids."""
    if value is None and ids is None:
        is_ids = type(prompt) is list and all(type(token) is int for token in prompt)
        return length + (len(prompt) if is_ids else 0)  # pyright: ignore[reportArgumentType]  # a list where is_ids
    total = len(ids) if value is None and ids is not None else whole(value, "total_length")
    if ids is not None and len(ids) != total:
        raise FieldError(f"tokens has {len(ids)} ids but total_length is {total}: must be equal; correct one of the two")
    if total < length:
        what = "total_length is" if value is not None else "tokens has"
        raise FieldError(f"{what} {total} but response_length is {length}: prompt and response together cannot be shorter")
    return total


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
