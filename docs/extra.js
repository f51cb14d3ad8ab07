// A browser lets pages from the disk start no worker and read no index, so the theme hides their search.
if (location.protocol === "file:") {
  const note = document.createElement("p")
  note.className = "from-disk"
  note.textContent = "To search, serve these pages: make docs && python -m http.server -d site"
  document.querySelector(".md-sidebar--primary .md-sidebar__inner").prepend(note)
}
