"""A scheduling policy: short prompts first, where 64 later requests may overtake for each 256 tokens of difference.

pip install ./examples/python; pagewire scheduler --scheduling-policy shortest ...
"""

from scheduler_service.core import PriorityQueue, SequenceGroup
from scheduler_service.policies import find_fault


class ShortestFirst(PriorityQueue):
    reads_priority = False  # requests must not set what `append` computes

    def append(self, group: SequenceGroup) -> None:
        group.priority = group.num_prompt_tokens // 256
        super().append(group)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        return False  # a short prompt overtakes in the queue, but preempts no running request


if __name__ == "__main__":
    print(find_fault(ShortestFirst) or "keeps every request, in one order")
