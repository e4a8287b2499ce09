# %% [markdown]
# # Build an attack and a defence, and let them meet
#
# You write an attack in ten lines and a defence in ten more, put them against those
# that are built in, and then read your own defence as an attacker would.
#
# Download this page as a notebook: <a href="duel.ipynb">duel.ipynb</a>.

# %%
import matplotlib.pyplot as plt
import numpy as np

import cbdsl

spec = cbdsl.preset("strong-iid").with_settings(
    {
        "model": "mlp",
        "workers": 20,
        "rounds": 8,
        "data.samples_per_worker": 100,
        "data.shared_training": 100,
        "data.shared_scoring": 300,
        "data.holdout": 300,
        "local.epochs": 1,
    }
)

# %% [markdown]
# ## An attack
#
# An attack is a class. It is asked for a claim, and, if it is invited, for a model;
# where everybody uploads (FedAvg), only for the model. What it may know comes as
# an `AttackContext`: the model that an honest worker in its place would send, the
# last global model w^g, a random generator.
#
# This one goes backwards: it takes the honest step, turns it round and doubles it.


# %%
class Backwards(cbdsl.Attack):
    """w^g minus twice the honest step, under the honest step's score."""

    def upload(self, seen):
        return seen.global_best - 2 * (seen.model - seen.global_best)


# %% [markdown]
# ## A defence
#
# An aggregator is a function: models `(k, D)` in, one model `(D,)` out. `trust` is what
# a server with data of its own may compare them with; here we use w^g alone.
#
# This one believes the crowd: it takes the coordinate-wise median as the direction
# everybody means, drops whoever goes against it, and averages the rest.


# %%
def with_the_crowd(rows, attackers, trust):
    """The mean of those models whose step from w^g goes the way of the median step."""
    steps = rows - trust.reference
    direction = np.median(steps, axis=0)
    agree = steps @ direction >= 0
    return rows[agree].mean(axis=0) if agree.any() else rows.mean(axis=0)


# %% [markdown]
# Before anything else, put both through the laws that every part has to keep: one
# worker, attackers alone, NaN, any order of workers. A part that breaks one is told
# which. (The first draft of this defence said `> 0`; the law test sent it equal models,
# nobody agreed with a step of length zero, and their mean was not a number.)

# %%
from cbdsl import testing

testing.check_attack(Backwards())
testing.check_aggregator(with_the_crowd)

# %% [markdown]
# ## They meet
#
# Six of twenty workers attack. Rows of the table are attacks, the built-in ones by
# name; columns are defences. CB-DSL with a guard joins in as the last one: it does not
# average, it verifies.


# %%
def bout(attack, defence, byzantine=6):
    """The final accuracy, in percent."""
    chosen = spec.with_settings({"attack.byzantine": byzantine if attack else 0})
    if defence == "cb-dsl":
        chosen = chosen.with_settings(
            {"defence.guard": True, "defence.commitment": True}
        )
        return 100 * cbdsl.run(chosen, attack=attack).summary.final_accuracy
    chosen = chosen.with_settings({"method": "fedavg", "shared": "train"})
    return (
        100
        * cbdsl.run(chosen, attack=attack, aggregator=defence).summary.final_accuracy
    )


defences = {
    "mean": "mean",
    "median": "median",
    "Krum": "krum",
    "with the crowd\n(yours)": with_the_crowd,
    "CB-DSL,\nguarded": "cb-dsl",
}
attacks = {
    "nobody": None,
    "sign-flip": "sign-flip",
    "alie": "alie",
    "backwards (yours)": Backwards(),
}
table = {
    name: [bout(attack, defence) for defence in defences.values()]
    for name, attack in attacks.items()
}
for name, row in table.items():
    print(f"{name:18}", "  ".join(f"{value:5.1f}" for value in row))

# %% [markdown]
# ## Now read your own defence
#
# `with_the_crowd` drops whoever points *against* the median. So do not point against
# it. Take the honest step, which points the right way, and add a long one to the side:
# towards a scrambled copy of w^g. In 50,000 dimensions such a direction is nearly
# orthogonal to any other, so the product with the median step stays above zero.


# %%
class Sidestep(cbdsl.Attack):
    """The honest step, and far towards w^g with its weights moved on by one."""

    def upload(self, seen):
        scrambled = np.roll(seen.global_best, 1)
        return seen.model + 5 * (scrambled - seen.global_best)


table["sidestep (yours,\nhas read it)"] = [
    bout(Sidestep(), defence) for defence in defences.values()
]

# %% [markdown]
# ## The table

# %%
values = np.array(list(table.values()))
figure, axes = plt.subplots(figsize=(8.6, 4.6))
axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
for (row, column), value in np.ndenumerate(values):
    axes.text(
        column,
        row,
        f"{value:.0f}",
        ha="center",
        va="center",
        color="#fffffe" if value < 55 else "#111111",
        fontsize=13,
    )
axes.set_xticks(range(len(defences)), defences)
axes.set_yticks(range(len(table)), table)
axes.tick_params(length=0)
axes.grid(visible=False)
axes.spines[:].set_visible(False)
axes.set_title("Final accuracy, %: 6 of 20 workers attack (one seed, 8 rounds)")

# %% [markdown]
# Your defence beats your first attack and falls to your second: it never looked at the
# length of a step. The median stands, coordinate by coordinate, as long as fewer than
# half attack. Verification does not care about geometry at all: a model that is bad
# scores badly on data that the server holds, and whoever claims otherwise is banned. It
# pays for that with two points when nobody attacks, because one model is no average.
#
# That is not the end of it: an attacker can send a model with a *true* good score that
# is bad elsewhere. `cbdsl list attacks` has ten who have read this code, [attacks and
# defences](../attacks.md) tells what they achieve, and `cbdsl arena --plugin
# my_parts.py` sets parts of yours against all of them.
