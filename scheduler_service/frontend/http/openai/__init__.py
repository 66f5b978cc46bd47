"""The routes of OpenAI's API, with vLLM's additions. Each route converts JSON to calls of InferenceService."""
