"""Chat templates whose values share parts, or whose filters and methods multiply: none takes time or memory."""

import json
import subprocess
import sys

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.template.sandbox import TemplateSandbox
from qwen_onnx.runners.text.template.sizes import METER, Meter
from support.patience import PATIENCE

USER = {"role": "user", "content": "Hi"}


def repeated(body: str, rounds: int = 99_999, **variables: str) -> str:
    """A template that sets variables and then does something many times."""
    sets = "".join(f"{{% set {name} = {value} %}}" for name, value in variables.items())
    return f"{sets}{{% for i in range({rounds}) %}}{body}{{% endfor %}}"


def nested(value: str, rounds: int = 60) -> str:
    """A template that makes `ns.l`, which holds twice, each time, what it was before."""
    return (
        "{% set ns = namespace(l=(1,), m=(1,)) %}"
        + repeated(f"{{% set ns.l = {value} %}}{{% set ns.m = (ns.m, ns.m) %}}", rounds)
        + "{{ {ns.l: 1} }}{{ ns.l }}{{ ns.l == ns.m }}{{ ns.l | tojson }}{{ ns.m in ns.l }}"
    )


CUBE = "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}"
LONG, PATTERN = "'a' * 4000000", "'ab' + 'a' * 500000"
COLLIDING = "range(0, 100000 * (2 ** 61 - 1), 2 ** 61 - 1)"

REFUSED = {
    "nested tuples": nested("(ns.l, ns.l)"),
    "nested lists": nested("[ns.l, ns.l]"),
    "nested dicts": nested("{'a': ns.l, 'b': ns.l}"),
    "nested by dict": nested("dict(a=ns.l, b=ns.l)"),
    "nested by a view": nested("{'a': ns.l, 'b': ns.l}.items()"),
    "nested by a mapping": nested("{'a': ns.l, 'b': ns.l}.keys().mapping"),
    "nested by a filter": nested("[ns.l, ns.l] | batch(2) | list"),
    "nested by groups": nested("[[ns.l, ns.l]] | groupby(0) | list"),
    "nested by a cycler": nested("cycler(ns.l, ns.l).items"),
    "nested by an iterator": nested("[ns.l, ns.l] | map('default') | list"),
    "deep": nested("(ns.l,)", 99_999),
    "nested by arguments": "{% macro f(n) %}{{ f(n + 1, varargs, varargs) if n < 60 else varargs }}{% endmacro %}"
    "{{ f(0) }}",
    "nested by names": "{% macro f(n) %}{{ f(n + 1, a=kwargs, b=kwargs) if n < 60 else kwargs }}{% endmacro %}"
    "{{ f(0) }}",
    **{
        f"cube {use}": CUBE + "{{ " + use + " }}"
        for use in (
            "c",
            "c | tojson",
            "c | string",
            "c | join",
            "'%s' % (c,)",
            "c ~ 'a'",
            "raise_exception(c)",
        )
    },
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 1000000).replace('', 'b' * 100000) }}",
    "replace by name": "{{ ['a' * 1000000] | map('replace', 'a', 'b' * 100000) | list }}",
    "join": "{{ ('a' * 1000000).join(['a'] * 100000) }}",
    "join what a filter yields": "{{ ('a' * 1000000).join((['a'] * 100000) | map('string')) }}",
    "join filter": "{{ (['a'] * 100000) | join('a' * 1000000) }}",
    "expandtabs": r"{{ ('\t' * 1000000).expandtabs(tabsize=100000) }}",
    "translate": "{{ ('a' * 1000000).translate(['b' * 1000] * 200) }}",
    "encode": "{{ ('a' * 1000000).encode() }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "format widths": "{{ ('{:>999999}' * 5000).format(*[1] * 5000) }}",
    "format a width given": "{{ '{:{}}'.format('x', 10 ** 9) }}",
    "format one many times": "{{ ('{0}' * 10000).format('x' * 1000000) }}",
    "format_map": "{{ ('{a}' * 10000).format_map({'a': 'x' * 1000000}) }}",
    "% names": "{{ '%(a)s' * 10000 % {'a': 'x' * 1000000} }}",
    "% widths": "{{ ('%999999d' * 5000) | format(*[1] * 5000) }}",
    "% by a test": "{{ ['%999999999d'] | select('odd') | list }}{{ '%999999999d' is divisibleby(7) }}",
    "indent": r"{{ ('\n' * 1000000) | indent('x' * 100000, blank=true) }}",
    "indent less": r"{{ ('a\n' * 100000) | indent(200000, first=-10 ** 9) }}",
    "tojson indent": "{{ ([[1]] * 100000) | tojson(indent=200000) }}",
    "tojson indent less": "{{ ([1] * 100000) | tojson(ensure_ascii=-10 ** 9, indent=200000) }}",
    "tojson separators": "{{ ([1] * 100000) | tojson(separators=('x' * 1000000, ':')) }}",
    "title": "{{ ('x ' * 8000000) | title | length }}",
    "list": "{{ ('é' * 16000000) | list | length }}",
    "split": "{{ ('ab ' * 5000000).split() | length }}",
    "splitlines": r"{{ ('ab\n' * 5000000).splitlines() | length }}",
    "many joined": "{% set a = 'x' * 16000000 %}{% set b = " + " ~ ".join("a" * 200) + " %}",
    "compare texts": repeated("{{ a == b }}", a="'x' * 16000000", b="'x' * 16000000"),
    "compare lists": repeated("{{ a == b }}", a="[0] * 300000", b="[0] * 300000"),
    "compare by a test": repeated("{{ a is eq b }}", a="[0] * 300000", b="[0] * 300000"),
    "compare by a name": "{% set a = [0] * 300000 %}{{ range(99999) | select('in', a) | list }}",
    "compare in a loop object": repeated("{{ loop.changed(['x' * 9000000]) }}"),
    "keys": repeated("{{ d[k] }}", k="'x' * 9000000", d="{'x' * 9000000: 1}"),
    "search": repeated("{{ p in t }}", t="'a' * 29999", p="'b' + 'a' * 98"),
    "search backwards": f"{{{{ ({LONG}).rfind({PATTERN}) }}}}",
    "split backwards": f"{{{{ ({LONG}).rsplit({PATTERN}) }}}}",
    "strip": f"{{{{ ({LONG}).strip('b' * 4000000 + 'a') }}}}",
    "trim": f"{{{{ ({LONG}) | trim('b' * 4000000 + 'a') }}}}",
    "slices": repeated("{% set x = a[0:] %}", a="[0] * 300000"),
    "slices of text": repeated("{% set x = a[1:] %}", a="'x' * 16000000"),
    "blocks": repeated("{% set x %}{{ a }}{{ a }}{% endset %}", a="'x' * 8000000"),
    "blocks of the template": repeated("{% set x %}" + "x" * 99_999 + "{{ i }}{% endset %}"),
    "nothing written": repeated("{{ ''[i:] }}" * 2000),
    "statements": repeated("{% set x = i %}" * 2000),
    "statements of a macro": "{% macro f() %}"
    + "{% set x = i %}" * 2000
    + "{% endmacro %}"
    + repeated("{{ f() }}"),
    "conditions": "{% for i in range(99999) if " + "i and 0 or " * 90 + "0 %}{% endfor %}",
    "sum": repeated("{% set x = range(100000) | sum %}"),
    "sum of lists": "{{ ([[1]] * 90000) | sum(start=[0] * 200000) }}",
    "yielding filters": "{% set ns = namespace(g=range(100000)) %}"
    + repeated("{% set ns.g = ns.g | select %}", 300)
    + "{{ ns.g | list }}",
    "same hashes": f"{{{{ {COLLIDING} | unique | list }}}}",
    "same hashes in a dict": f"{{{{ dict({COLLIDING} | batch(2)) }}}}",
    "tuples in a set": "{{ dict(range(90000) | batch(2)).items() | unique | list }}",
    "tuples as keys": "{% set d = dict(range(2000) | batch(2)) %}{{ dict(d.items() | batch(2)) }}",
    "arguments": "{% macro f() %}{{ kwargs | length }}{% endmacro %}"
    + repeated("{{ f(**a) }}", a="dict(range(90000) | map('string') | batch(2))"),
    "names of attributes": "{% set p = '0' ~ '.0' * 1000000 %}{{ ([[1]] * 90000) | sort(attribute=p) }}",
    "long numbers": "{{ ('f' * 9000000) | int(base=16) // ('f' * 4000000) | int(base=16) }}",
    "digits": repeated("{{ 5 | round(-300000) }}"),
    "kept texts": "{% set ns = namespace(l=[]) %}" + repeated("{% set ns.l = [ns.l, '🔥' * 4000000] %}"),
    "escaping": "{% autoescape true %}{{ '&' * 16000000 }}{% endautoescape %}",
    "less work": repeated("{{ [-9999] | map('repeated part') | list }}", 99_999),
    "a long template": "{{ x }}" * 50_000,
}

CHILD = """
import json, sys
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
except ImportError:
    pass
for name, source in json.load(sys.stdin).items():
    print(json.dumps(name), end=" ", flush=True)
    try:
        said = str(len(ChatTemplate(source).render([{"role": "user", "content": "Hi"}]))) + " characters"
    except UserError as error:
        said = str(error)
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each template made or how it was refused, in a process that may take 2 GiB."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = child.communicate(json.dumps(REFUSED), timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
    found = {}
    for line in output.splitlines():
        name, end = json.JSONDecoder().raw_decode(line)
        found[name] = json.loads(line[end:] or '"it hangs"')
    return found


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.thorough
def test_what_multiplies_is_refused(outcomes: dict[str, str], name: str) -> None:
    """It would hang in C code, where no Ctrl-C helps, or take the machine's memory."""
    said = outcomes.get(name, "the process ended before")
    assert "SecurityError" in said or "TemplateSyntaxError" in said, said


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set n = namespace() %}{% set n.a = n %}{% set n.b = [n, n] %}{{ n.b }}", "[<Namespace>, <Namespace>]"),
        ("{{ '{{ {} }} {:>5}'.format(1, 'x') }}", "{ 1 }     x"),
        ("""{{ '{"a": {"b": "%s"}}' % 'x' }}{{ '* %s **b**' % 1 }}""", '{"a": {"b": "x"}}* 1 **b**'),
        (r"{{ 'a\nb' | indent }}{{ 'a\tb'.expandtabs() }}{{ '-'.join('abc') }}", "a\n    ba       ba-b-c"),
        ("{{ 'a b  c'.split() }}{{ 'a,b,c'.split(',', 1) }}", "['a', 'b', 'c']['a', 'b,c']"),
        ("{{ messages | selectattr('no') is defined and true if messages | select('none') else 'no' }}", "True"),
        ("{{ messages[0:] | map(attribute='role') | first }}{{ [[1], [2]] | sum(start=[]) }}", "user[1, 2]"),
        ("{% for k, v in [{'a': 1}, {'a': 2}] | groupby('a') %}{{ k }}{{ v }}{% endfor %}", "1[{'a': 1}]2[{'a': 2}]"),
        ("{{ 1 < 2 < 3 }}{{ 'a' in messages[0].role in ['user'] }}{{ {(1, 2): 3} }}", "TrueFalse{(1, 2): 3}"),
        ("{% for i in range(4) if i is odd %}{{ i }}{{ loop.last }}{% endfor %}{{ 7 // 2 }}", "1False3True3"),
    ],
)  # fmt: skip
def test_honest_values_are_left_alone(source: str, text: str) -> None:
    assert ChatTemplate(source).render([USER]) == text


def test_what_is_not_gone_over_is_not_counted() -> None:
    """Each round of a loop may ask for a long conversation's length, or for a message's role."""
    messages = [{"role": "user", "content": "x" * 5000}] * 2000
    meter = Meter()
    source = (
        "{% for m in messages %}{{ loop.index0 == messages | length - 1 }}{{ m.get('role') }}{% endfor %}"
    )
    TemplateSandbox().bounded_template(source).render({"messages": messages, METER: meter})
    assert meter.spent < 20_000


def test_a_refusal_is_not_as_long_as_what_is_refused() -> None:
    """As of `raise_exception` with a whole conversation."""
    with pytest.raises(UserError) as caught:
        ChatTemplate("{{ raise_exception(messages[0].content * 1000) }}").render([USER])
    assert len(str(caught.value)) < 5000
