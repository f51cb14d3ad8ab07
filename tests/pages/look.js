// What a reader of this page would miss, at the window's width: a line each (test_site.py).
() => {
  const problems = new Set()
  const wide = document.documentElement.clientWidth
  const start = element => element.textContent.trim().slice(0, 60)
  const scrolls = element => {
    for (let parent = element; parent !== document.body; parent = parent.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(parent).overflowX)) return true
    return false
  }
  if (document.documentElement.scrollWidth > wide) problems.add("the page scrolls sideways")
  for (const element of document.querySelectorAll("article *")) {
    if (!element.textContent.trim() || element.closest("svg, .md-clipboard, .headerlink")) continue
    const { width, right } = element.getBoundingClientRect()
    if (width && right > wide + 1 && (wide < 600 || !scrolls(element))) problems.add(`cut off: ${start(element)}`)
  }
  for (const code of document.querySelectorAll("article pre > code")) {
    if (code.scrollWidth > code.clientWidth + 1) problems.add(`code is cut off: ${start(code)}`)
    if (!code.parentElement.querySelector(".md-clipboard, .md-code__button")) problems.add(`no copy button: ${start(code)}`)
  }
  for (const cell of document.querySelectorAll("article :is(th, td)")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT)
    while (texts.nextNode())
      for (const name of texts.currentNode.data.matchAll(/\w+/g)) {
        const range = document.createRange()
        range.setStart(texts.currentNode, name.index)
        range.setEnd(texts.currentNode, name.index + name[0].length)
        const lines = new Set([...range.getClientRects()].map(line => Math.round(line.top)))
        if (lines.size > 1) problems.add(`broken within a word: ${name[0]}`)
      }
  }
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) problems.add(`no image: ${image.src}`)
  return [...problems]
}
