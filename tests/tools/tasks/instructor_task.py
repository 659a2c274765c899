"""instructor: an object by a tool and by a JSON Schema; `Mode.JSON` leaves the form to a model larger than ours."""

import os

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or else a small model adds fields without end
    result: int = Field(ge=0, le=999)


client = openai.OpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    answer = patched.chat.completions.create(
        model=os.environ["TANDEM_MODEL"],
        response_model=Sum,
        max_retries=2,
        max_tokens=48,
        temperature=0,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
    )
    assert isinstance(answer, Sum), mode
