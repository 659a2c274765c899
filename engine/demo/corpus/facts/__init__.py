"""What the built-in model knows about serving language models and about Tandem: one answer for each fact."""

from engine.demo.corpus.facts.chat_commands import CHAT_COMMANDS
from engine.demo.corpus.facts.commands import COMMANDS
from engine.demo.corpus.facts.concepts import CONCEPTS
from engine.demo.corpus.facts.differences import DIFFERENCES
from engine.demo.corpus.facts.endpoints import ENDPOINTS
from engine.demo.corpus.facts.errors import ERRORS
from engine.demo.corpus.facts.fact import Fact, Kind
from engine.demo.corpus.facts.measures import MEASURES
from engine.demo.corpus.facts.remedies import REMEDIES
from engine.demo.corpus.facts.system import SYSTEM
from engine.demo.corpus.facts.tasks import TASKS
from engine.demo.corpus.facts.tooling import TOOLING

FACTS: tuple[Fact, ...] = (
    *CONCEPTS,
    *SYSTEM,
    *MEASURES,
    *COMMANDS,
    *CHAT_COMMANDS,
    *TOOLING,
    *ENDPOINTS,
    *TASKS,
    *REMEDIES,
    *ERRORS,
    *DIFFERENCES,
)

__all__ = ["FACTS", "Fact", "Kind"]
