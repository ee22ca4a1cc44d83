from pathlib import Path

import pytest

from shared.errors import CheckpointError, RequestError
from shared.glm.template import ChatTemplate


def render(source: str, **arguments: object) -> str:
    template = ChatTemplate(source, {"eos_token": "<end>"}, name="t")
    return template.render(
        [{"role": "user", "content": "hi"}],
        None,
        add_generation_prompt=True,
        arguments=arguments,
    )


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = (
        "{% for m in [1, 2] %}\n  {% if m == 2 %}{% break %}{% endif %}\nx{{ m }}\n{% endfor %}"
    )
    assert render(source) == "x1\n"


def test_tojson_keeps_html_characters_and_unicode() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_special_tokens_and_arguments_are_variables() -> None:
    assert render("{{ eos_token }}{{ level }}", level="high") == "<end>high"


def test_generation_blocks_print_their_body() -> None:
    assert render("{% generation %}x{% endgeneration %}") == "x"


def test_a_template_that_does_not_compile_is_refused_with_its_line() -> None:
    with pytest.raises(CheckpointError, match="t: line 2"):
        ChatTemplate("\n{% if %}", {}, name="t")


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_raise_exception_becomes_a_request_error_with_its_text() -> None:
    with pytest.raises(RequestError, match="no system role"):
        render("{{ raise_exception('no system role') }}")


@pytest.mark.parametrize(
    "source", ["{{ messages[5].x }}", "{{ 1 + 'a' }}", "{{ ().__class__.x() }}"]
)
def test_a_failing_template_fails_the_request_only(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_argument_names_are_what_the_template_reads_and_nothing_else() -> None:
    template = ChatTemplate(
        "{% set x = 1 %}{{ messages }}{{ enable_thinking }}{{ x }}{{ eos_token }}", {}, name="t"
    )
    assert template.argument_names == {"enable_thinking"}
