# %% [markdown]
# # The paper in ten minutes
#
# CB-DSL makes three promises: it learns from data that is spread unevenly, it needs a
# fraction of the uplink of federated averaging, and one attacker cannot break it. We
# test each, small enough to wait for: twenty workers instead of fifty, fifteen
# rounds, one seed. (The whole thing, three seeds and every claim judged, is `cbdsl
# reproduce`; its outcome is on [the results' page](../results.md).)
#
# Download this page as a notebook: <a href="paper.ipynb">paper.ipynb</a>.
#
# ## The setting
#
# Each worker holds 300 images of MNIST, of at most four digits: the images are sorted
# by digit, cut into shards of 150, and everybody gets two. That is what *non-i.i.d.*
# means here. The server has a shared set D_G: 500 labelled images to score on (D_sc),
# and 300 that everybody also trains on (D_tr).

# %%
import matplotlib.pyplot as plt

import cbdsl

spec = cbdsl.preset("paper-noniid").with_settings(
    {
        "workers": 20,
        "rounds": 15,
        "data.shard_size": 150,
        "data.shared_scoring": 500,
        "data.shared_training": 300,
        "data.holdout": 500,
        "local.learning_rate": 0.01,
    }
)

# %% [markdown]
# ## Can it learn?
#
# Three runs on the same samples from the same initial model: the seed decides both.
# First FedAvg, then CB-DSL without any shared data, then with D_G.

# %%
runs = {
    "FedAvg": cbdsl.run(spec.with_settings({"method": "fedavg", "shared": "none"})),
    "CB-DSL, nothing shared": cbdsl.run(spec.with_settings({"shared": "none"})),
    "CB-DSL with D_G": cbdsl.run(spec),
}
for name, result in runs.items():
    print(f"{name:23} {result.summary.final_accuracy:6.1%}")

# %% [markdown]
# Without shared data CB-DSL guesses. A worker that knows three digits scores itself on
# those three, is very pleased, and becomes everybody's model. D_sc makes scores
# comparable, D_tr shows everybody all ten digits, and the swarm learns.
#
# To be fair to FedAvg: given the same D_tr it learns as well as CB-DSL does. Try it:
# `{"method": "fedavg", "shared": "train"}`. What is left of the advantage then is what
# the next two sections are about.
#
# ## What did it send?

# %%
for name, result in runs.items():
    said = result.summary
    print(f"{name:23} {said.uploads:4} models up, {said.uplink_bytes / 1e6:5.1f} MB")

# %% [markdown]
# In a round of FedAvg twenty models go up. In a round of CB-DSL twenty *numbers* go up,
# and one model. That is where the paper's 1/U comes from.
#
# ## One attacker
#
# Now one of the twenty claims a score of one in a million and, when it is invited,
# uploads noise.

# %%
lied_to = {
    "FedAvg": cbdsl.run(
        spec.with_settings(
            {"method": "fedavg", "shared": "none", "attack.byzantine": 1}
        )
    ),
    "CB-DSL with D_G": cbdsl.run(spec.with_settings({"attack.byzantine": 1})),
}
for name, result in lied_to.items():
    said = result.summary
    print(f"{name:23} {said.final_accuracy:6.1%}, banned: {said.banned}")
lied_to["CB-DSL with D_G"].rounds[0].verdicts

# %% [markdown]
# The list is what the server wrote down about its invitations of round 1: the attacker
# was asked first, its model measured, its claim *refuted*. A refuted worker is banned
# for good. FedAvg took the noise into the average, in every round.
#
# ## All of it in one figure

# %%
colours = {
    "FedAvg": "#d55e00",
    "CB-DSL, nothing shared": "#8a4f7d",
    "CB-DSL with D_G": "#0072b2",
}
figure, (by_round, by_bytes) = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True)
for name, result in runs.items():
    rounds = [line.round for line in result.rounds]
    accuracy = [100 * line.test_accuracy for line in result.rounds]
    sent = [
        sum(line.uplink_bytes for line in result.rounds[: at + 1]) / 1e6
        for at in range(len(rounds))
    ]
    by_round.plot(rounds, accuracy, color=colours[name], linewidth=2, label=name)
    by_bytes.plot(sent, accuracy, color=colours[name], linewidth=2)
for (name, result), mark in zip(lied_to.items(), "xo"):
    accuracy = [100 * line.test_accuracy for line in result.rounds]
    by_round.plot(
        rounds,
        accuracy,
        mark,
        color=colours[name],
        fillstyle="none",
        label=f"{name}, one attacker",
    )
by_round.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, 100))
by_round.set_title("It learns, and one attacker does not matter")
by_bytes.set(xscale="log", xlabel="MB uploaded by all workers together")
by_bytes.xaxis.set_major_formatter("{x:g}")
by_bytes.set_title("At a twentieth of the uplink")
figure.legend(loc="outside lower center", ncols=3)

# %% [markdown]
# ## What you have not seen
#
# One seed proves nothing, and this attack is a simple one. [Results,
# honestly](../results.md) has the claims with their p-values, and those that do not
# hold; [attacks and defences](../attacks.md) has attacks that are not. In [the next
# notebook but one](duel.nb.py) you write one yourself.
