"""Vectors of texts, and scores of documents for a query, in the formats of OpenAI, Jina, Cohere and vLLM."""
