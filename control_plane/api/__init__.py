"""HTTP endpoints: OpenAI, Workers AI's REST and binding, administration and the OpenAPI document."""
