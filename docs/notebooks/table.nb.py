# %% [markdown]
# # From an idea to a table
#
# A new defence for averaging, against two that are known, under one attack: three
# seeds each, a paired test, and a LaTeX table for the paper.
#
# Download this page as a notebook: <a href="table.ipynb">table.ipynb</a>.

# %%
import matplotlib.pyplot as plt
import numpy as np

import cbdsl

spec = cbdsl.Spec(method="fedavg", model="softmax", workers=12, rounds=6).with_settings(
    {
        "data.samples_per_worker": 60,
        "data.partition": "dirichlet",
        "local.learning_rate": 0.02,
        "attack.name": "sign-flip",
        "attack.byzantine": 3,
    }
)


# %% [markdown]
# ## The idea
#
# Models that lie close to many others are likely to be honest. Weight every model by
# how near its neighbours are: one over the mean distance to the nearer half of them.


# %%
def by_neighbours(rows, attackers, trust):
    """Weight models (k, D) by one over their mean distance to the nearer half."""
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    near = np.sort(distances, axis=1)[:, 1 : len(rows) // 2 + 1].mean(axis=1)
    weights = 1 / (near + 1e-12)
    return (weights / weights.sum()) @ rows


# %% [markdown]
# ## The runs
#
# Runs with the same seed have the same data, starting point and attackers, so defences
# are compared seed by seed.

# %%
defences = {"mean": "mean", "median": "median", "neighbours": by_neighbours}
runs = {
    name: [
        cbdsl.run(spec.with_settings({"seed": seed}), aggregator=rule)
        for seed in range(3)
    ]
    for name, rule in defences.items()
}
runs["neighbours"][0].to_frame()[["test_accuracy", "uplink_bytes"]].tail(3)

# %% [markdown]
# ## The test
#
# `difference` is to the new defence, `low` and `high` bound its mean with 95 %
# confidence, and `p` is the paired t-test's. `exact_p` assumes no distribution, and
# with three seeds it cannot be below 0.25: for a claim that rests on it, run six or
# more. Where the interval contains 0, three seeds do not show a difference.

# %%
table = cbdsl.compare(runs, against="neighbours")
columns = ["mean", "difference", "low", "high", "p", "exact_p"]
table[[f"final_accuracy_{column}" for column in columns]].round(3)

# %% [markdown]
# ## For the paper

# %%
print(cbdsl.compare(runs, against="neighbours", order="best", to="tex"))

# %%
figure, axes = plt.subplots(figsize=(8, 4))
for name, results in runs.items():
    curves = [[line.test_accuracy for line in result.rounds] for result in results]
    axes.plot(range(1, spec.rounds + 1), np.mean(curves, axis=0), label=name)
axes.set(xlabel="round", ylabel="test accuracy, mean of three seeds")
axes.legend()
axes.set_title("Three defences, three attackers of twelve")
plt.show()
