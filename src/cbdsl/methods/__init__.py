"""The methods: which conversation each holds, how its workers move, what its server does. One file each."""

from cbdsl.methods.base import AveragingMethod, Conversation, Method, SwarmMethod

__all__ = ["AveragingMethod", "Conversation", "Method", "SwarmMethod"]
