"""Finds the fewest workers that answer a load in time, without a GPU. `pagewire fit` measures a cost model."""

import random

from scheduler_service.policies import waiting_queue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.simulator import Simulator
from scheduler_service.simulation.summary import ttft
from scheduler_service.simulation.trace import Arrival

REQUESTS_PER_SECOND, NUM_REQUESTS, LIMIT = 12.0, 120, 1.0

draw, now, arrivals = random.Random(1), 0.0, []
for _ in range(NUM_REQUESTS):
    now += draw.expovariate(REQUESTS_PER_SECOND)
    arrivals.append(Arrival(now, prompt_tokens=draw.randint(100, 2000), output_tokens=draw.randint(20, 200)))

for workers in range(1, 17):
    simulator = Simulator(arrivals, CostModel(), num_workers=workers, waiting=waiting_queue("fcfs"))
    late = ttft(simulator.run().requests)["p99"]
    print(f"{workers} workers: 99 % of requests have their first token after {late:.2f} s")
    if late <= LIMIT:
        break
