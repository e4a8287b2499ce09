# %% [markdown]
# # How many bytes does a point of accuracy cost?
#
# On a radio link a byte costs energy, money or time. This page asks what each way of
# learning together pays for its accuracy, up and down, and what a codec changes.
#
# Download this page as a notebook: <a href="bytes.ipynb">bytes.ipynb</a>.
#
# ## Six ways
#
# The same twenty workers, the same samples, the same network of 50,890 weights, twelve
# rounds, one seed. FedAvg and CB-DSL, each with models as they are (32 bits a weight),
# and with differences in 4 or 3 bits; and [verified
# rotation](../idea.md#beyond-one-winner-verified-rotation), in which six workers in
# turn upload.

# %%
import matplotlib.pyplot as plt
import numpy as np

import cbdsl

spec = cbdsl.preset("strong-iid").with_settings(
    {
        "model": "mlp",
        "workers": 20,
        "rounds": 12,
        "data.samples_per_worker": 150,
        "data.shared_scoring": 500,
        "data.holdout": 500,
        "local.epochs": 1,
    }
)
average, q4, q3 = (
    {"method": "fedavg", "shared": "train"},
    {"codec.up": "q4", "codec.down": "q4"},
    {"codec.up": "q3", "codec.down": "q3"},
)
ways = {
    "FedAvg": average,
    "FedAvg, 4 bits": average | q4,
    "CB-DSL": {},
    "CB-DSL, 4 bits": q4,
    "CB-DSL, 3 bits": q3,
    "rotation, 4 bits": {
        "method": "restart",
        "selection.name": "rotation",
        "selection.k": 6,
    }
    | q4,
}
runs = {
    name: cbdsl.run(spec.with_settings(settings)) for name, settings in ways.items()
}

# %% [markdown]
# ## The bill
#
# `summary` has the payload of all workers together. A message to many counts once for
# each of them.

# %%
print(f"{'':18}{'accuracy':>9}{'up, MB':>9}{'down, MB':>10}")
for name, result in runs.items():
    said = result.summary
    up, down = said.uplink_bytes / 1e6, said.downlink_bytes / 1e6
    print(f"{name:18}{said.final_accuracy:9.1%}{up:9.2f}{down:10.2f}")

# %% [markdown]
# CB-DSL saves the uplink, and only that: w^g goes to everybody, as in FedAvg. The codec
# saves both directions alike: FedAvg in 4 bits sends less than CB-DSL in 32. What
# CB-DSL keeps, codec or not, is the uplink; and on most radios the uplink is the dear
# direction.
#
# ## Bytes for a point
#
# How much had been sent, both ways, when a way first reached 70, 80, 85 %? Dividing
# what the last step cost by the points it gained is the price of a point; it rises
# steeply, whoever sells.


# %%
def sent(result):
    """MB so far after each round, both ways."""
    return (
        np.cumsum([line.uplink_bytes + line.downlink_bytes for line in result.rounds])
        / 1e6
    )


def until(result, accuracy):
    """MB until a test accuracy is reached; nothing if it never is."""
    reached = [
        at for at, line in enumerate(result.rounds) if line.test_accuracy >= accuracy
    ]
    return sent(result)[reached[0]] if reached else None


MARKS = (0.70, 0.80, 0.85)
print(
    f"{'MB until':18}"
    + "".join(f"{mark:>9.0%}" for mark in MARKS)
    + "   a point from 80 to 85 %"
)
for name, result in runs.items():
    costs = [until(result, mark) for mark in MARKS]
    row = "".join("        -" if cost is None else f"{cost:9.2f}" for cost in costs)
    print(
        f"{name:18}{row}"
        + ("" if costs[2] is None else f"{(costs[2] - costs[1]) / 5:14.2f} MB")
    )

# %% [markdown]
# ## The figure

# %%
colours = {"FedAvg": "#d55e00", "CB-DSL": "#0072b2", "rotation": "#00805f"}
figure, axes = plt.subplots(figsize=(9, 4.8))
for name, result in runs.items():
    colour = colours[name.split(",")[0]]
    style = "--" if "4 bits" in name else ":" if "3 bits" in name else "-"
    accuracy = [100 * line.test_accuracy for line in result.rounds]
    axes.plot(sent(result), accuracy, style, color=colour, linewidth=2.2, label=name)
    axes.plot(sent(result)[-1], accuracy[-1], "o", color=colour, markersize=7)
axes.set(
    xscale="log",
    xlabel="MB sent so far by everybody, up and down",
    ylabel="test accuracy, %",
)
axes.xaxis.set_major_formatter("{x:g}")
axes.set_title("FedAvg's accuracy for a seventeenth of its bytes")
axes.legend(loc="lower right", ncols=2)

# %% [markdown]
# One seed, an easy data set, and a codec that suits it. [Codecs](../codecs.md) has
# three seeds of the paper's own experiments; `benchmarks/codecs.py none,q4,q3` says
# what packing costs in time. Numbers on a network include topics, framing and D_G once
# for everybody: [on real machines](../deploy.md).
