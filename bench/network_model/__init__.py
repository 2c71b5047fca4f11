"""How well the cost model foretells what collectives take on emulated links.

    python -m bench.network_model [--quick] [--output json] [--result FILE]

Every collective that a compressor can ask for, and every schedule of our own, is timed on N hosts
for a grid of sizes, rates and delays. Predictions are those of ``policies.cost`` with latency and
bandwidth of the link as asked for, and as the controller would fit them from half of the sizes.
"""
