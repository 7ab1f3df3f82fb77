"""The methods, filters and tests that chat templates may use: what they cost and make is known before they run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

from qwen_onnx.runners.text.template.sizes import (
    ELEMENT,
    MOST_ELEMENTS,
    MOST_WORK,
    Meter,
    check_count,
    check_size,
    meter_of,
)

_TEXT_METHODS = """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
"""
_FILTERS = """
    abs attr batch capitalize center count d default dictsort e escape first float forceescape format groupby indent
    int items join last length list lower map max min random reject rejectattr replace reverse round safe select
    selectattr slice sort string sum title tojson trim truncate unique upper
"""
_TESTS = """
    != < <= == > >= boolean callable defined divisibleby eq equalto escaped even false float ge greaterthan gt in
    integer iterable le lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper
"""
# These take the same time, however large the value is.
_CONSTANT_METHODS = frozenset(("endswith", "get", "items", "keys", "startswith", "values"))
_CONSTANT_FILTERS = frozenset(("attr", "count", "d", "default", "first", "last", "length", "random"))
_CONSTANT_TESTS = """
    boolean callable defined escaped false float integer iterable mapping none number sameas sequence string true
    undefined
"""
_GOING_OVER = """
    batch dictsort groupby join list map max min reject rejectattr select selectattr slice sort sum unique
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
}
# These search backwards, or for each of their characters: at worst, length times length.
_SLOW_SEARCHES = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"))
_SEARCHES = frozenset(("count", "find", "index", "partition", "replace", "split")) | _SLOW_SEARCHES
_STEPS_A_ROUND = 2**14
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LONGEST_FORMAT = 2**16
_LONGEST_NUMBER = 4096
_MOST_DIGITS = 100


def allowed(owner: object, attribute: str) -> bool | None:
    """Return whether a template may fetch this attribute of a value of Python's own types; of others, None."""
    methods = _METHODS.get(type(owner))
    if methods is not None:
        return attribute in methods
    if isinstance(owner, str):  # text that is marked as safe
        return attribute in _METHODS[str]
    return False if type(owner).__module__ == "builtins" else None


def bounded_arguments(
    meter: Meter, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which to call a method of a Python type.

    Raises SecurityError when the call would make or do too much.
    """
    owner, name = method.__self__, method.__name__
    given = (*args, *kwargs.values())
    for arg in given:
        meter.use(arg)
    if name in _CONSTANT_METHODS:
        return args, kwargs
    meter.use(owner)
    if not isinstance(owner, str):
        return args, kwargs
    if name in ("format", "format_map"):
        check_size(formatted_size(meter, owner, given, "{"))
        return args, kwargs
    for arg in given:
        check_count(arg)
    if name in _SEARCHES:
        meter.spend(_search(owner, given, slow=name in _SLOW_SEARCHES))
    match name, args:
        case (("split" | "rsplit"), _) if len(args) <= 2 and kwargs.keys() <= {"sep", "maxsplit"}:
            most = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
            # One more than may be, so that none is lost: the list is refused.
            if len(args) < 2 and isinstance(most, int) and not 0 <= most <= MOST_ELEMENTS:
                kwargs = kwargs | {"maxsplit": MOST_ELEMENTS}
        case "splitlines", _:
            check_size(_lines(owner) * ELEMENT)
        case "join", (Iterator() as items,):
            return bounded_arguments(meter, method, (meter.listed(items),), kwargs)
        case "join", (items,):
            check_size(meter.size(items) + len(owner) * _length(items))
        case "replace", (str(old), str(new), *_):
            check_size(_replaced(owner, old, new))
        case "expandtabs", _:
            check_size(
                len(owner) + owner.count("\t") * max((8, *(arg for arg in given if isinstance(arg, int))))
            )
    return args, kwargs


def formatted_size(meter: Meter, text: str, args: Sequence[object], mark: str) -> int:
    """Return at least the size of `text`, in which `mark` stands where one of `args` goes, formatted."""
    # A width may be that of an argument: `*`, or a field in a field.
    varying = r"%[^%a-zA-Z]*\*" if mark == "%" else r"\{[^{}]*\{"
    if len(text) > _LONGEST_FORMAT or re.search(rf"\d{{7}}|{varying}", text.replace("{{", "")):
        raise SecurityError("a format that is too long, too wide or has a variable width")
    widths = sum(int(digits) for digits in re.findall(r"\d+", text))
    fields = text.count(mark)
    meter.spend(fields + len(text) // ELEMENT)
    return len(text) + widths + fields * max((meter.size(arg) for arg in args), default=0)


def bounded_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters that templates may use, each within bounds."""
    return {
        name: filter_ if name in _CONSTANT_FILTERS else _bounded_filter(name, filter_)
        for name, filter_ in filters.items()
        if name in _FILTERS.split()
    }


def bounded_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests that templates may use, each within bounds."""
    return {
        name: test if name in _CONSTANT_TESTS.split() else _bounded_test(name, test)
        for name, test in tests.items()
        if name in _TESTS.split()
    }


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    going_over = name in _GOING_OVER.split()

    @pass_context
    def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.spend(1)
        # What an iterator costs and holds is known when it has become a list.
        if isinstance(value, Iterator):
            value = meter.listed(value)
        given = (*args, *kwargs.values())
        for each in (value, *given):
            meter.use(each)
        if going_over and isinstance(value, Sized):
            check_count(len(value))
            patterns = sum(len(arg) for arg in given if isinstance(arg, str))
            meter.spend(len(value) * (1 + patterns // 16) // 16)
        _check_filter(meter, name, value, given)
        result = context.call(function, value, *args, **kwargs)
        if isinstance(result, Iterator):
            # As Jinja's generators, it is never false.
            return iter(meter.made(meter.listed(result)))
        return meter.made(result)

    return bounded


def _check_filter(meter: Meter, name: str, value: Any, given: tuple[Any, ...]) -> None:
    if name in ("batch", "center", "indent", "slice", "tojson"):
        for arg in given:
            check_count(arg)
    match name:
        case "replace" if len(given) > 1:
            text, old, new = str(value), str(given[0]), str(given[1])
            meter.spend(_search(text, (old,), slow=False))
            check_size(_replaced(text, old, new))
        case "trim":
            meter.spend(_search(str(value), given, slow=True))
        case "join":
            check_size(meter.size(value) + _length(value) * sum(map(meter.size, given)))
        case "indent":
            lines = _lines(str(value))
            meter.spend(lines // 4)
            check_size(meter.size(value) + lines * max(ELEMENT, _widths(meter, given)))
        case "format":
            check_size(formatted_size(meter, str(value), given, "%"))
        case "tojson":
            size, depth = meter.extent(value)
            check_size(size + size // ELEMENT * (depth + 1) * _widths(meter, given))
        case "title":
            # Jinja makes a list of the words.
            meter.use(value, ELEMENT)
            check_size(meter.size(value) * ELEMENT // 2)
        case "int" | "float" if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
            raise SecurityError("a number of too many digits")
        case "round" if any(isinstance(arg, int) and abs(arg) > _MOST_DIGITS for arg in given):
            raise SecurityError("a number of too many digits")
        case "unique":
            meter.hashed(_length(value))
        case "sum" if any(isinstance(arg, list | tuple) for arg in given):
            # Each list is added to a copy of those before.
            meter.spend(meter.size(value) // ELEMENT * _length(value) // 256)


def _bounded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.spend(1)
        for each in (value, *args, *kwargs.values()):
            meter.use(each)
        if name in ("divisibleby", "even", "odd") and isinstance(value, str):
            raise SecurityError(f"{name!r} of a text")  # which would be formatted: it is `%`
        if name == "in" and args and isinstance(value, str) and isinstance(args[0], str):
            meter.spend(_search(args[0], (value,), slow=False))
        return context.call(function, value, *args, **kwargs)

    return bounded


def _widths(meter: Meter, given: Sequence[object]) -> int:
    return sum(max(0, arg) if isinstance(arg, int) else meter.size(arg) for arg in given if arg is not None)


def _search(text: str, given: Sequence[object], *, slow: bool) -> int:
    needle = max((len(arg) for arg in given if isinstance(arg, str)), default=0)
    return len(text) * (needle if slow else min(needle, 100)) // _STEPS_A_ROUND


def _replaced(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) * (len(new) - len(old)) if len(new) > len(old) else 0)


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, _LINE_ENDS))


def _length(items: object) -> int:
    return min(len(items), MOST_WORK) if isinstance(items, Sized) else 1
