"""The methods by name: which conversation each holds, and how its workers move."""
