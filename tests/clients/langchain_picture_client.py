"""langchain-openai: a picture, whole and streamed."""

import json
import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

base_url, api_key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, temperature=0, max_retries=0)
question = HumanMessage(
    content=[
        {"type": "image_url", "image_url": {"url": os.environ["PICTURE"]}},
        {"type": "text", "text": "What is this?"},
    ]
)
streamed = "".join(chunk.content for chunk in chat.stream([question]))
print(json.dumps({"whole": chat.invoke([question]).content, "streamed": streamed}))
