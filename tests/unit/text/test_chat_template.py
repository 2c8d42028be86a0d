from __future__ import annotations

from datetime import datetime

import pytest

from jaxinfer.chat_template import MAX_OUTPUT_CHARS, ChatTemplate
from jaxinfer.errors import ChatTemplateError, InvalidRequestError
from tests.unit.text.vocabularies import golden, smollm2

HELLO = [{"role": "user", "content": "hello"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def render(source, messages=HELLO, **settings):
    settings.setdefault("add_generation_prompt", False)
    return ChatTemplate(source).render(messages, **settings)


class TestGoldens:
    @pytest.mark.parametrize("case", golden("chat")["renderings"])
    def test_renderings_equal_transformers(self, case):
        chats = golden("chat")
        template = ChatTemplate(chats["templates"][case["template"]], chats["variables"])
        assert template.render(case["messages"], **case["settings"]) == case["text"]

    @pytest.mark.real
    def test_default_model_brings_the_template_of_the_golden(self):
        template = smollm2()._chat_templates["default"]
        assert template.source == golden("chat")["templates"]["smollm2"]


class TestWhatTemplatesRelyOn:
    def test_strftime_now_reads_the_given_clock(self):
        template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2024, 2, 29))
        assert template.render(HELLO) == "2024-02-29"

    def test_tojson_leaves_html_and_unicode_alone(self):
        assert render("{{ x | tojson }}", x={"a": "<é>&'"}) == '{"a": "<é>&\'"}'
        assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"

    def test_missing_variables_are_empty(self):
        assert render("[{{ bos_token }}{{ enable_thinking }}]") == "[]"

    def test_own_variables_reach_the_template(self):
        assert render("{{ enable_thinking }}", enable_thinking=False) == "False"

    def test_tools_and_documents_are_none_unless_given(self):
        assert render("{{ tools is none }} {{ documents is none }}") == "True True"

    def test_template_cannot_change_the_callers_messages(self):
        messages = [{"role": "user", "content": "x", "extra": {"k": [1]}}]
        with pytest.raises(ChatTemplateError):
            render("{{ messages[0].extra.k.append(2) }}", messages)
        assert messages[0]["extra"]["k"] == [1]


class TestContent:
    def test_text_parts_read_as_one_text(self):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert render(PLAIN, [{"role": "user", "content": parts}]) == "user: one\ntwo\n"

    @pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
    def test_other_parts_are_refused_by_name(self, kind):
        parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
        with pytest.raises(ChatTemplateError, match=rf"content\[1\].*{kind}"):
            render(PLAIN, [{"role": "user", "content": parts}])

    def test_message_that_calls_tools_may_have_no_content(self):
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
        assert render(PLAIN, [*HELLO, message]).endswith("assistant: \n")

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "non-empty list"),
            ("hello", "non-empty list"),
            (None, "non-empty list"),
            (["hello"], r"messages\[0\] must be an object"),
            ([{"content": "x"}], r"messages\[0\]\.role"),
            ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
            ([*HELLO, {"role": "user"}], r"messages\[1\]\.content is missing"),
            ([{"role": "user", "content": 3}], "must be a string or a list"),
            ([{"role": "user", "content": {}}], "must be a string or a list"),
            ([{"role": "user", "content": ["x"]}], r"content\[0\].*'str'"),
            ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
            ([{"role": "user", "content": "x", "name": object()}], r"\.name .*JSON types"),
        ],
    )
    def test_malformed_messages_are_named(self, messages, message):
        with pytest.raises(ChatTemplateError, match=message) as caught:
            render(PLAIN, messages)
        assert caught.value.param == "messages"

    def test_endless_nesting_is_refused(self):
        nested = {"role": "user", "content": "x"}
        nested["self"] = nested
        with pytest.raises(ChatTemplateError, match="nested"):
            render(PLAIN, [nested])


class TestContinuing:
    MESSAGES = (*HELLO, {"role": "assistant", "content": "Once upon"})

    def test_last_message_stays_open(self):
        text = render(PLAIN + "<end>", self.MESSAGES, continue_final_message=True)
        assert text == "user: hello\nassistant: Once upon"

    def test_trimming_template_trims_the_open_message_too(self):
        source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        messages = [{"role": "assistant", "content": "so \n"}]
        assert render(source, messages, continue_final_message=True) == "[so"

    def test_needs_that_no_new_turn_is_opened(self):
        with pytest.raises(ChatTemplateError, match="add_generation_prompt=false"):
            render(PLAIN, self.MESSAGES, continue_final_message=True, add_generation_prompt=True)

    def test_template_that_drops_the_message_is_an_error(self):
        with pytest.raises(ChatTemplateError, match="leaves the last message out"):
            render("{{ messages[0].content }}", self.MESSAGES, continue_final_message=True)


class TestBrokenTemplates:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% for m in messages %}", "does not parse"),
            ("{{ messages | nonsense }}", "nonsense"),
            ("\n{% if %}", "line 2"),
            ("{{ raise_exception('roles must alternate') }}", "refuses.*roles must alternate"),
            ("{{ messages[0].nothing.more }}", "refuses.*nothing"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages[0].content + 1 }}", "TypeError"),
            ("{{ messages[99].content }}", "refuses|fails"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
            ("{% include 'other' %}", "fails|refuses"),
        ],
    )
    def test_failure_is_a_clear_request_error(self, source, message):
        with pytest.raises(ChatTemplateError, match=message) as caught:
            render(source)
        assert isinstance(caught.value, InvalidRequestError)
        assert caught.value.param == "messages"

    def test_broken_template_harms_only_chats(self):
        template = ChatTemplate("{% if %}")
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match="does not parse"):
                template.render(HELLO)


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ strftime_now.__closure__[0].cell_contents }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ self._TemplateReference__context.environment }}",
            "{{ ''|attr('__class__')|attr('__mro__') }}",
            "{{ '{0.__class__.__mro__}'.format('') }}",
            "{{ ('{0.__cla' ~ 'ss__}').format_map({'0': ''}) }}",
            "{% set x = messages.append(1) %}",
            "{% set x = messages[0].update({'role': 'system'}) %}",
            "{% set x = messages[0].pop('role') %}",
            "{{ (messages[0].items|attr('__self__')) }}{{ messages.clear() }}",
            "{% import 'os' as os %}",
            "{{ namespace.__init__.__globals__ }}",
        ],
    )
    def test_escape_attempts_find_nothing(self, source):
        try:
            text = render(source)
        except ChatTemplateError:
            return
        assert text.strip() == ""

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'a' * 10**12 }}",
            "{{ 10**12 * 'a' }}",
            "{{ 2 ** (10**10) }}",
            "{{ [0] * 10**12 }}",
            "{{ '%999999999999d' % 1 }}",
            "{% for i in range(10**9) %}x{% endfor %}",
            "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        ],
    )
    def test_excess_is_cut_short(self, source):
        with pytest.raises(ChatTemplateError):
            render(source)

    def test_long_conversations_fit(self):
        long = "x" * (MAX_OUTPUT_CHARS // 64)
        assert len(render(PLAIN, [{"role": "user", "content": long}])) > len(long)
