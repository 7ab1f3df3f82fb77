from pathlib import Path

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from support.text_fixtures import QWEN3_LIKE, QWEN25_LIKE

USER = {"role": "user", "content": "What's 2 < 3? 好 é🔥"}
ANSWER = {"role": "assistant", "content": "<think>\n2 is less\n</think>\n\nYes."}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now['__globals__'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ ('{0.__class__}' | attr('format'))('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{{ namespace(__call__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ (messages | first | attr('pop'))('role') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_refuses(source: str) -> None:
    """No downloaded template runs code, reads files or edits the conversation."""
    messages = [dict(USER)]
    template = ChatTemplate(source)
    with pytest.raises(UserError):
        template.render(messages)
    assert messages == [USER]


DOUBLING = "{% set ns = namespace(s='xy', l=[1]) %}{% for i in range(99) %}{% set ns.DOUBLED %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set big %}{% for i in range(20000) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
        "{% for i in range(99999) %}{% set x = 'x' * 10 ** 6 %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 12, 1) }}",
        "{{ 'x' | center(999999999999) }}",
        "{{ 'x'.ljust(10 ** 12) }}",
        "{{ [1] | tojson(indent=10 ** 12) }}",
        "{{ lipsum(n=10 ** 9) }}",
        DOUBLING.replace("DOUBLED", "s = ns.s ~ ns.s"),
        DOUBLING.replace("DOUBLED", "s = ns.s + ns.s"),
        DOUBLING.replace("DOUBLED", "s = [ns.s, ns.s] | join"),
        DOUBLING.replace("DOUBLED", "l = ns.l + ns.l"),
        "{{" + "(" * 9999 + "1" + ")" * 9999 + "}}",
    ],
)
def test_bombs_are_refused(source: str) -> None:
    """No downloaded template hangs the machine or takes its memory."""
    with pytest.raises(UserError) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_work_is_counted_anew_for_each_render() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done")
    assert [template.render([]) for _ in range(5)] == ["done"] * 5


def test_a_long_conversation_renders() -> None:
    """2,000 messages, and one of 15 MiB; 16 MiB is the bound."""
    many = [USER, ANSWER] * 1000
    assert ChatTemplate(QWEN3_LIKE).render(many).count("<|im_start|>") == 2001
    long = [{"role": "user", "content": "x" * (15 << 20)}]
    assert len(ChatTemplate(QWEN25_LIKE).render(long)) > 15 << 20
    with pytest.raises(UserError, match="16 MiB"):
        ChatTemplate(QWEN25_LIKE).render(long * 2)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[5].role }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent=none, separators=3) }}", "TypeError"),
    ],
)
def test_a_failing_template_is_one_line(source: str, said: str) -> None:
    """With the template's own words where it has some."""
    with pytest.raises(UserError, match=said) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_values_with_methods_are_refused() -> None:
    """A template could call methods of what the caller put into a message."""
    with pytest.raises(UserError, match="Path"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": Path("x")}])
