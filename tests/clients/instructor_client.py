"""instructor: answers as pydantic models, whole and while they grow."""

import json
import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody. (Words are given: the demo model isn't trained on JSON.)"""

    name: Literal["Anna", "Ben"]
    adult: bool


base_url, api_key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
client = instructor.from_openai(
    openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0), mode=instructor.Mode.TOOLS
)
options = {
    "model": model,
    "response_model": Person,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Anna is 30 years old."}],
}
full_completion = client.chat.completions.create(max_retries=0, **options)
*_, last = client.chat.completions.create_partial(**options)
print(json.dumps({"whole": full_completion.model_dump(), "streamed": last.model_dump()}))
