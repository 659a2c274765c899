"""lm-eval: a task of its own, by completions (log probabilities of prompts) and by chat completions (generation)."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [{"question": "What is 1 + 1?", "answer": "2", "choices": ["2", "7"], "label": 0}] * 3
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "Q: {{question}}\\nA:"
"""
CHOICE = (
    COMMON
    + """
task: tandem_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
)
ANSWER = (
    COMMON
    + """
task: tandem_answer
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""
)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (folder / "choice.yaml").write_text(CHOICE % data)
    (folder / "answer.yaml").write_text(ANSWER % data)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    base, model = os.environ["TANDEM_URL"], os.environ["TANDEM_MODEL"]
    own = f"model={model},tokenizer={os.environ['TANDEM_CHECKPOINT']},max_retries=1,num_concurrent=2"
    for kind, path, task in (
        ("local-completions", "/v1/completions", "tandem_choice"),
        ("local-completions", "/v1/completions", "tandem_answer"),
        ("local-chat-completions", "/v1/chat/completions", "tandem_answer"),
    ):
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=f"{own},base_url={base}{path}",
            tasks=[task],
            task_manager=tasks,
            apply_chat_template=kind == "local-chat-completions",
        )
        assert task in found["results"], found
