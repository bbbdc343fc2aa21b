"""OpenAI's endpoints: one module a family, schemas beside them."""
