// Browsers start no worker for a page that was opened from disk, so that search would find nothing there: an invisible
// frame of the page takes its place. docs/make_site.py puts this file where the theme would fetch one from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inner = this.frame.contentWindow
      inner.postMessage = data => this.tell(data)
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: new URL(url, location.href), onload: resolve, onerror: reject })
        inner.document.documentElement.append(script)
      })
    }
    // As between page and worker: the other side gets a copy, and not before this one is done.
    tell(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) })
      setTimeout(() => {
        this.dispatchEvent(event)
        this.onmessage?.(event)
      })
    }
    postMessage(data) {
      const inner = this.frame.contentWindow
      const event = new inner.MessageEvent("message", { data: structuredClone(data) })
      this.ready.then(() => setTimeout(() => inner.dispatchEvent(event)))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
