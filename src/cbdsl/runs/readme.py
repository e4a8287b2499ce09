"""README.txt of a run's folder: every file that can be in it."""

README = """\
A run of cbdsl. `cbdsl watch` shows it in a browser, while it is played and afterwards.

README.txt         this page
spec.toml          what was run; `cbdsl run --spec spec.toml` runs it again
rounds.jsonl       one object a round: accuracy, score, verdicts, messages and bytes
summary.json       the run in one object
accuracy.png       test accuracy by round, drawn by the command line
model.safetensors  the final global model, its network, the scaling of features; `cbdsl predict` and `export` use it
init.safetensors   the model it started from, where one was given
theory.json        the run's constants and bounds, where `cbdsl theory` was asked for them
plugins/           the plugins as they were when the run was started
checkpoint.npz     the state of the server and, until the run is finished, of the swarm; `cbdsl resume` goes on from it
.lock              held by the process that plays the run
.NAME.partial      a file that was being written when its process was killed; it may be removed

Where workers are processes of their own (`cbdsl serve`, `cbdsl swarm`) also:

roster.json        the workers' names in the order of their numbers, and how many samples each says it holds
deployment.json    the number by which workers know this run, and the name of the swarm
events.jsonl       who came and went, what was refused and why; the time before that is in events.old.jsonl
claims.jsonl       what every worker claimed, round by round; the rounds before that are in claims.old.jsonl
refused.json       how many messages were refused, by reason and by worker
wire.json          bytes on the server's connection, by direction and kind of message
journal.bin        what was heard in the round that is being played; gone when the run is finished
.secret            the server's own number, by which it draws its private hold-out (serve); keep it to yourself
broker/            the broker's mosquitto.conf, passwords (a hash of the one of this run) and broker.log (swarm)
workers/           a folder for every worker: its samples, its state and its log, a README.txt in each (swarm)
"""
