"""What the built-in model knows about serving language models and about Tandem: one answer for each fact."""

from engine.demo.corpus.facts.commands import COMMANDS
from engine.demo.corpus.facts.concepts import CONCEPTS
from engine.demo.corpus.facts.differences import DIFFERENCES
from engine.demo.corpus.facts.fact import Fact, Kind
from engine.demo.corpus.facts.measures import MEASURES
from engine.demo.corpus.facts.remedies import REMEDIES
from engine.demo.corpus.facts.tasks import TASKS

FACTS: tuple[Fact, ...] = (*CONCEPTS, *MEASURES, *COMMANDS, *TASKS, *REMEDIES, *DIFFERENCES)

__all__ = ["FACTS", "Fact", "Kind"]
