"""Short chat templates that treat thinking as those of each model family do."""

from __future__ import annotations

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- set last = namespace(user=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if message.role == 'user' and last.user == messages | length - 1 %}{%- set last.user = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- if not thinking and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thinking and loop.index0 > last.user %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""The model decides; `enable_thinking: false` ends the thinking in the prompt."""

DEEPSEEK_R1 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '</s>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""The prompt ends within the thinking. Tools are not rendered."""

GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n## functions\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: any) => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set last = namespace(call='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call in a message') }}{%- endif %}
        {%- set call = message.tool_calls[0] %}
        {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set last.call = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""Answers are messages in channels. Thinking before calls is kept, other thinking is dropped."""
