"""Completes every line of a file, in order, with several outputs for each: python batch.py < prompts.txt"""

import json
import os
import sys

from pagewire_client import LLM, SamplingParams

prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
target, key = os.environ.get("PAGEWIRE_TARGET", "127.0.0.1:50051"), os.environ.get("PAGEWIRE_CLIENT_API_KEY", "")
with LLM(target=target, api_key=key) as llm:
    sampling = SamplingParams(max_tokens=16, n=2, temperature=0.8, seed=1)
    for prompt, completion in zip(prompts, llm.generate(prompts, sampling), strict=True):
        print(json.dumps({"prompt": prompt, "outputs": [output.text for output in completion.outputs]}))
