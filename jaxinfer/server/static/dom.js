/**
 * Elements of the page, found and made.
 */

/** @param {string} id */
export const $ = (id) => document.getElementById(id);

/**
 * Return a new element. Text goes in as `textContent`, never as markup: it may be a model's.
 * @param {string} tag
 * @param {object} [properties]
 * @param {(Node|string)[]} [children]
 */
export function element(tag, properties = {}, children = []) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/**
 * Return a new SVG element.
 * @param {string} tag
 * @param {object} [attributes]
 */
export function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
