"""Load tests of a served model: traffic, users, measurement, results and their page.

what is sent      traffic (the file); payloads, from values, samples and shapes; request, sequence; answers: is it right
how it is sent    session (the job's side), worker (Locust's process): users, arrivals, senders; steps: one by one
what is counted   recorder, distribution, probe: how late the client is; definitions: what the figures mean
the server        address, signature, statistics, metrics; server_side: what is kept of them
what comes of it  results (`run.json`), folder, compare, noise, objective; page, charts and plot: `report.html`
tuning            tune and tuning: the best batching of a repository
"""
