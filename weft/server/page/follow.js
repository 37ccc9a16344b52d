// A scrolled element that stays at its end while its content grows, unless the reader scrolled up.

const NEAR_PX = 40;

/** `toLatest`: a button that is shown while the end is not. Returns `{toEnd}`. */
export function follow(container, content, toLatest) {
  let atEnd = true, top = 0;
  const isAtEnd = () => container.scrollHeight - container.scrollTop - container.clientHeight < NEAR_PX;
  const toEnd = () => {
    atEnd = true;
    container.scrollTop = container.scrollHeight;
    toLatest.hidden = true;
  };
  container.addEventListener("scroll", () => {
    if (isAtEnd()) atEnd = true;
    else if (container.scrollTop < top) atEnd = false; // by the reader: content that has grown meanwhile moves nothing up
    top = container.scrollTop;
    toLatest.hidden = atEnd;
  });
  toLatest.addEventListener("click", toEnd);
  const grown = new ResizeObserver(() => {
    if (atEnd) toEnd();
    else toLatest.hidden = isAtEnd();
  });
  grown.observe(content);
  grown.observe(container);
  return { toEnd };
}
