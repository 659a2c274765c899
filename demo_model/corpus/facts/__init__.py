"""The facts that the built-in model knows about serving language models and Tandem: one answer per fact."""

from demo_model.corpus.facts.chat_commands import CHAT_COMMANDS
from demo_model.corpus.facts.commands import COMMANDS
from demo_model.corpus.facts.concepts import CONCEPTS
from demo_model.corpus.facts.differences import DIFFERENCES
from demo_model.corpus.facts.endpoints import ENDPOINTS
from demo_model.corpus.facts.errors import ERRORS
from demo_model.corpus.facts.fact import Fact, Kind
from demo_model.corpus.facts.measures import MEASURES
from demo_model.corpus.facts.remedies import REMEDIES
from demo_model.corpus.facts.system import SYSTEM
from demo_model.corpus.facts.tasks import TASKS
from demo_model.corpus.facts.tooling import TOOLING

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
