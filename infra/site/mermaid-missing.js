// Stands in for Mermaid where build/mermaid.min.js is missing: a diagram is shown as its text, and nothing is fetched.
window.mermaid = {
  initialize() {},
  async render(id, text) {
    const escaped = text.replace(/[&<>]/g, (each) => `&#${each.charCodeAt(0)};`);
    return { svg: `<pre style="overflow-x: auto">${escaped}</pre>` };
  },
};
