"""What an organisation asks about itself, as OpenAI's API has it: usage and costs."""
