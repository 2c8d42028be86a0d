"""Past one machine, on Ray (extra `ray`): replicas behind Ray Serve, batches on Ray Data.

    prefix        what of a request decides where it goes
    router        Ray Serve's choice of a replica, by that
    replica       an engine with the whole HTTP application, as an actor
    front         takes requests from Ray's proxy and passes them on
    settings      of the application
    application   the two as an application, from its settings
    batch         a file of requests on many actors, with resume

Ray is imported by these modules only, and by nobody who does not ask for them.
"""
