// Draws the ```mermaid blocks of the pages. Without a network their text stays as it is.
const blocks = [...document.querySelectorAll("pre > code.language-mermaid")];
if (blocks.length > 0) {
  const { default: mermaid } = await import(
    "https://cdn.jsdelivr.net/npm/mermaid@11.4.1/dist/mermaid.esm.min.mjs"
  );
  for (const code of blocks) {
    const drawing = document.createElement("div");
    drawing.className = "mermaid";
    drawing.textContent = code.textContent;
    code.parentElement.replaceWith(drawing);
  }
  mermaid.initialize({ startOnLoad: false });
  await mermaid.run({ querySelector: "div.mermaid" });
}
