"""Writes chat.json: conversations rendered by jinja2 with the settings of Hugging Face's libraries.

    pip install jinja2 && python make_chat.py
"""

import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox

HERE = pathlib.Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

TEMPLATES = {
    "turns": """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    # As Qwen2's: tools, a default system message, control of white space.
    "tools": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # As Qwen3's: namespace, reversed slices, string methods, thoughts cut from earlier answers.
    "thinking": """\
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # As Llama 3's: a date, a system message taken off the front, filters, defaults.
    "headers": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # As Mistral's: roles must alternate.
    "instruct": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    # Python in Jinja: macros, items(), tojson, printed constants, loop controls, blocks and their white space.
    "python": """\
{# a comment #}
{% macro line(role, text='none') -%}
[{{ role.upper() }}|{{ text|default('?', true)|replace('\\n', ' / ') }}]
{%- endmacro %}
{% for m in messages %}
  {% if m.role == 'system' %}
    {% continue %}
  {% endif %}
  {{ line(m.role, m.content) }}
  {% for k, v in m.items() %}
{{ loop.index }}:{{ k }}={{ v|length }}{{ ',' if not loop.last }}
  {% endfor %}
  {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ messages[0]|tojson }} {{ messages[0]|tojson(indent=2) }}
{{ {'a': [1, 2.5, none, true], 'z<&>\\'': 'é"'}|tojson }}
{{ true }} {{ none }} {{ add_generation_prompt }} {{ missing }} {{ 7 // 2 }} {{ 2 ** 3 }} {{ 7 % 4 }} {{ 'ab' * 2 }}
{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ (messages|last).content[:3] }} {{ 'x' ~ 1 ~ 'y' }} {{ 'a,b'.split(',')[1] }} {{ '  t '.strip() }} {{ 'abc'.replace('b', '-') }}
{{ 'title case'.title() }} {{ 'a' in 'abc' }} {{ range(3)|list|length }} {{ messages is iterable }} {{ messages[0] is mapping }}
{% generation %}said{% endgeneration %}
{%- set parts = [] %}
{%- set parts = parts + ['p'] %}
 {{ parts[0] }}
{% set block %}in{{ 'ner' }}{% endset %}{{ block }}
""",
}

TALKS = {
    "short": [("user", "Hi")],
    "system": [("system", "  Be brief. "), ("user", "Who\nare <you> & 'I'?")],
    "long": [
        ("system", "S"),
        ("user", "one"),
        ("assistant", "<think>\nhm\n</think>\n\n 1 "),
        ("user", "zwei é 🙂"),
        ("assistant", "<think>\nagain\n</think>\n\n2"),
        ("user", "three"),
    ],
    "answered": [("user", "one"), ("assistant", "<think>\nwhy\n</think>\n\nbecause ")],
    "wrong": [("assistant", "first"), ("assistant", "again")],
}


class Generation(jinja2.ext.Extension):
    """The block that marks what the model said."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def fail(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = fail
    cases = []
    for name, source in TEMPLATES.items():
        template = env.from_string(source)
        for talk, messages in TALKS.items():
            for prompt in (False, True):
                case = {"template": name, "talk": talk, "prompt": prompt}
                try:
                    case["text"] = template.render(
                        messages=[{"role": role, "content": content} for role, content in messages],
                        tools=None,
                        documents=None,
                        add_generation_prompt=prompt,
                        **TOKENS,
                    )
                except jinja2.exceptions.TemplateError as e:
                    case["error"] = str(e)
                cases.append(case)
    out = {"templates": TEMPLATES, "talks": TALKS, "cases": cases}
    (HERE / "chat.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
