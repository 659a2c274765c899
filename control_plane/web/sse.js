// Reads server-sent events from a response (WHATWG HTML, "Parsing an event stream").

/** Yield `{event, data}` for each event of a response's body. `onBytes` is called with each piece, comments included. */
export async function* eventsOf(response, onBytes = () => undefined) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let event = "";
  let data = [];
  let isOver = false;
  try {
    while (!isOver) {
      const { value, done } = await reader.read();
      isOver = done;
      onBytes();
      const lines = (rest + decoder.decode(value, { stream: !done })).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    if (!isOver) reader.cancel().catch(() => undefined); // the connection may be gone already
  }
}
