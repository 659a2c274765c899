// The request of the playground as code to copy.

export const LANGUAGES = [
  { id: "curl", name: "curl" },
  { id: "python", name: "Python" },
  { id: "javascript", name: "JavaScript" },
  { id: "worker", name: "Worker" },
];

/**
 * Return the code for a call. `kind` is "chat", "completion" or "embeddings"; `hasToken`: the code reads it from the
 * environment, the token itself is never written.
 */
export function codeOf(language, { kind, path, body, origin, hasToken }) {
  return { curl, python, javascript, worker }[language]({ kind, path, body, origin, hasToken });
}

function curl({ path, body, origin, hasToken }) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const token = hasToken ? ` \\\n  -H "authorization: Bearer $TANDEM_TOKEN"` : "";
  return `curl -N ${origin}${path} \\\n  -H 'content-type: application/json'${token} \\\n  -d '${quoted}'`;
}

const METHODS = { chat: "chat.completions", completion: "completions", embeddings: "embeddings" };

function python({ kind, body, origin, hasToken }) {
  const key = hasToken ? `os.environ["TANDEM_TOKEN"]` : `"none"`;
  const lines = Object.entries(body).map(([name, value]) => `    ${name}=${pythonOf(value, "    ")},`);
  const call = `client.${METHODS[kind]}.create(\n${lines.join("\n")}\n)`;
  const head = `${hasToken ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key=${key})\n`;
  if (kind === "embeddings") return `${head}answer = ${call}\nfor item in answer.data:\n    print(len(item.embedding))`;
  const text = kind === "chat" ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  const shown = body.tools ? "    print(chunk.choices[0].delta)" : `    print(${text} or "", end="", flush=True)`;
  return `${head}stream = ${call}\nfor chunk in stream:\n${shown}`;
}

/** Write a JSON value as a Python literal. */
function pythonOf(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((item) => pythonOf(item, deeper))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonOf(item, deeper)}`);
  const [open, close] = isList ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length <= 60 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${deeper}${item},`).join("\n")}\n${indent}${close}`;
}

function javascript({ kind, body, origin, hasToken }) {
  const key = hasToken ? "process.env.TANDEM_TOKEN" : `"none"`;
  const call = `await client.${METHODS[kind]}.create(${scriptOf(body)});`;
  const head = `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${origin}/v1", apiKey: ${key} });\n`;
  if (kind === "embeddings") return `${head}const answer = ${call}\nfor (const item of answer.data) console.log(item.embedding.length);`;
  const text = kind === "chat" ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  const shown = body.tools ? "console.log(chunk.choices[0].delta)" : `process.stdout.write(${text} ?? "")`;
  return `${head}const stream = ${call}\nfor await (const chunk of stream) ${shown};`;
}

function worker({ kind, body }) {
  const { model, input, ...others } = body;
  const inputs = kind === "embeddings" ? { text: input } : others;
  const call = `env.AI.run("${model}", ${scriptOf(inputs, "    ")})`;
  const answer =
    kind === "embeddings"
      ? `    return Response.json(await ${call});`
      : `    const stream = await ${call};\n    return new Response(stream, { headers: { "content-type": "text/event-stream" } });`;
  return `// tandem dev DIR runs this Worker on your machine, with Tandem behind env.AI.
export default {
  async fetch(request, env) {
${answer}
  },
};`;
}

/** Write a JSON value as JavaScript: keys without quotes where that is possible. */
function scriptOf(value, indent = "") {
  const text = JSON.stringify(value, null, 2).replaceAll("\n", `\n${indent}`);
  return text.replace(/^(\s*)"([A-Za-z_$][\w$]*)":/gm, "$1$2:");
}
