// The search of the built pages, in place of the one that mkdocs brings. That one reads JSON in a
// worker, which a browser allows no page that is opened as a file. This one loads scripts only:
// lunr.js of mkdocs, and search_index.js, which index.py writes.
const found = document.getElementById("mkdocs-search-results");

function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "search/" + name; // the page of the search is at the root
    script.onload = resolve;
    script.onerror = () => reject(new Error("cannot load " + script.src));
    document.body.append(script);
  });
}

function build() {
  lunr.tokenizer.separator = new RegExp(searchIndex.config.separator);
  return lunr(function () {
    this.ref("location");
    this.field("title", { boost: 10 });
    this.field("text");
    searchIndex.docs.forEach((each) => this.add(each));
  });
}

// Each word as it is, or the beginning of one: what is typed is never an expression.
function search(index, words) {
  return index.query((query) => {
    for (const token of lunr.tokenizer(words)) {
      query.term(token.toString(), { boost: 10 });
      query.term(token.toString(), { usePipeline: false, wildcard: lunr.Query.wildcard.TRAILING });
    }
  });
}

function show(results, pages) {
  found.textContent = results.length ? "" : found.dataset.noResultsText;
  for (const { ref } of results) {
    const article = document.createElement("article");
    const link = document.createElement("a");
    const text = document.createElement("p");
    link.href = ref;
    link.textContent = pages.get(ref).title;
    text.textContent = pages.get(ref).text.slice(0, 200);
    article.append(document.createElement("h3"), text);
    article.firstChild.append(link);
    found.append(article);
  }
}

async function begin() {
  await Promise.all([load("lunr.js"), load("search_index.js")]);
  const field = document.getElementById("mkdocs-search-query");
  const pages = new Map(searchIndex.docs.map((each) => [each.location, each]));
  const index = build();
  const answer = () => {
    const words = field.value.trim();
    const isLong = words.length >= searchIndex.config.min_search_length;
    show(isLong ? search(index, words) : [], pages);
  };
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  field.addEventListener("input", answer);
  answer();
}

if (found) begin();
