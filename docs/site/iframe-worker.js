// Search runs in a worker, which browsers refuse to a page of the file system: there a hidden frame does its work.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<script>postMessage = parent.postMessage.bind(parent)</script><script src="${url}"></script>`);
      page.close();
      addEventListener("message", ({ source, data }) => {
        if (source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }));
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
