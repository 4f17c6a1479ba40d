// Unpacks what a page holds (its data, plotly.js, the script that draws) and runs it. The only script that is there unpacked.
"use strict";

let DATA = null;

function failed(error) {
  const message = document.createElement("p");
  message.className = "warn";
  message.setAttribute("role", "alert");
  message.textContent = `This page could not be drawn: ${error.message}`;
  document.getElementById("page").prepend(message);
}

async function unpacked(id) {
  const packed = document.getElementById(id);
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  packed.remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function run(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.body.append(script);
}

(async () => {
  try {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack its data; Chrome or Edge 80, Firefox 113 and Safari 16.4 and newer can");
    DATA = JSON.parse(await unpacked("data"));
    run(await unpacked("plotly"));
    if (typeof Plotly === "undefined") throw new Error("the browser did not run plotly.js, which is in the page");
    run(await unpacked("drawing"));
  } catch (error) {
    failed(error);
    throw error;
  }
})();
