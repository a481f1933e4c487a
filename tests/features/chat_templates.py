"""Chat templates in the style of popular models', as far as tests need them."""

# ChatML with a default system prompt and tools, as Qwen 2.5 has it.
QWEN = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- else %}{% set system = 'Be helpful.' %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{- '\\n<tools>' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '</tools>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant\\n' }}
{%- if m.content %}{{- m.content }}{% endif %}
{%- for call in m.tool_calls %}{{- '<tool_call>{"name": "' + call.function.name + '", '
 + '"arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role != 'system' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Thoughts of the last turn alone, as Qwen 3 has them; with FORCED a prompt ends with <think>.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thoughts = m.reasoning_content or '' %}{% set content = m.content %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nFORCED' }}{% endif %}"""
QWEN_THINKING = QWEN3.replace("FORCED", "<think>\\n")
QWEN3 = QWEN3.replace("FORCED", "")

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim
 + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
