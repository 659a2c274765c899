"""Facts: what can be typed in `tandem chat`."""

from demo_model.corpus.facts.fact import concept, task

CHAT_COMMANDS = (
    concept(
        "/reset makes tandem chat forget the conversation. The system message stays.",
        "/reset", "the /reset command", "/reset in tandem chat", "the command /reset",
    ),
    concept(
        "/model lists the models served. With a name, tandem chat goes on with that model.",
        "/model", "the /model command", "/model in tandem chat", "the command /model",
    ),
    concept(
        "/system shows the system message of tandem chat. With a text it sets it, and /system - removes it.",
        "/system", "the /system command", "/system in tandem chat", "the command /system",
    ),
    concept(
        "/retry makes tandem chat ask the last question again.",
        "/retry", "the /retry command", "/retry in tandem chat", "the command /retry",
    ),
    concept(
        "/save writes the conversation of tandem chat to a file as JSON.",
        "/save", "the /save command", "/save in tandem chat", "the command /save",
    ),
    concept(
        "/help lists the commands of tandem chat, such as /reset, /model, /retry and /quit.",
        "/help", "the /help command", "/help in tandem chat", "the command /help",
    ),
    concept(
        "/quit ends tandem chat. Ctrl-D does the same.",
        "/quit", "the /quit command", "/quit in tandem chat", "the command /quit", "Ctrl-D in tandem chat",
    ),
    concept(
        "Ctrl-C stops an answer of tandem chat. What came so far stays in the conversation.",
        "Ctrl-C in tandem chat", "Ctrl-C in the chat", "pressing Ctrl-C in tandem chat", "Ctrl-C during an answer",
    ),
    task(
        "Type /quit or press Ctrl-D.",
        "leave tandem chat", "end the chat", "quit the chat", "get out of tandem chat",
    ),
    task(
        "Type /reset in tandem chat. It forgets the conversation and keeps the system message.",
        "start a new conversation", "reset the chat", "clear the chat", "make the chat forget everything",
    ),
    task(
        "Type /model in tandem chat with the name of the other model. The conversation stays.",
        "switch the model in the chat", "change the model in tandem chat", "chat with another model",
        "use another model in the chat",
    ),
    task(
        "Type /retry in tandem chat. It asks the last question again.",
        "ask the last question again", "get another answer in the chat", "retry in tandem chat",
        "repeat my question in the chat",
    ),
    task(
        "Type /save with a file name in tandem chat. It writes the conversation as JSON.",
        "save the conversation", "save the chat", "write the chat to a file", "keep a copy of the conversation",
    ),
)  # fmt: skip
